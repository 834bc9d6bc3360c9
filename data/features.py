"""Ids that are computed: hashes of feature crosses, and their tables' sizes."""

import numpy as np

from data.checks import require
from data.store import EventStore

# feature -> keys in hashing order; the item, its artist and its album are the candidate's
CROSSES = {
    "user_x_artist": ("uid", "artist_id"),
    "user_x_album": ("uid", "album_id"),
    "user_x_hour": ("uid", "hour_of_day"),
    "item_x_hour": ("item_id", "hour_of_day"),
    "artist_x_hour": ("artist_id", "hour_of_day"),
    "user_x_is_organic": ("uid", "is_organic"),
    "user_x_artist_x_hour": ("uid", "artist_id", "hour_of_day"),
}
CONTEXTUAL_FEATURES = ("uid", *CROSSES)
DEFAULT_TABLE_ROWS = {  # the benchmark's
    "item_id": 9_390_624,
    "artist_id": 1_293_395,
    "album_id": 3_367_692,
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}

_PRIME_1, _PRIME_2, _PRIME_3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_PRIME_4, _PRIME_5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)


def xxh64(*keys: np.ndarray) -> np.ndarray:
    """XXH64 with seed 0 of one to three keys, int64 [n] each, laid out little-endian one after the other: uint64 [n].

    Source: the XXH64 specification, the path for inputs under 32 bytes, which are a whole number of 8-byte lanes here.
    """
    assert 1 <= len(keys) <= 3, "longer inputs take another path of XXH64"
    value = np.full(np.shape(keys[0]), _PRIME_5 + np.uint64(8 * len(keys)))
    for key in keys:
        lane = _rotate(np.asarray(key, dtype=np.int64).astype(np.uint64) * _PRIME_2, 31) * _PRIME_1
        value = _rotate(value ^ lane, 27) * _PRIME_1 + _PRIME_4
    value = (value ^ (value >> np.uint64(33))) * _PRIME_2
    value = (value ^ (value >> np.uint64(29))) * _PRIME_3
    return value ^ (value >> np.uint64(32))


def _rotate(value: np.ndarray, bits: int) -> np.ndarray:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


def hour_of_day(time: np.ndarray) -> np.ndarray:
    """Hour, 0 to 23, of a time in the data's own seconds."""
    return time // 3600 % 24


def contextual_ids(names: tuple[str, ...], keys: dict[str, np.ndarray], table_rows: dict[str, int]) -> np.ndarray:
    """int32 [C, B]: the id of each named feature, "uid" or a cross, for B samples whose keys are int64 [B] by name.

    A cross is the hash of its keys modulo its table's rows.
    """
    ids = np.zeros((len(names), len(keys["uid"])), dtype=np.int32)
    for row, name in enumerate(names):
        if name == "uid":
            ids[row] = keys["uid"]
        else:
            ids[row] = xxh64(*(keys[key] for key in CROSSES[name])) % np.uint64(table_rows[name])
    return ids


def check_tables(store: EventStore, names: tuple[str, ...], table_rows: dict[str, int]) -> None:
    """Raise ValueError unless every feature is known, has a table, and every id of the store has a row in its table.

    Looks at the largest ids the manifest records, no column; that no id is negative was checked when the store was made.
    """
    for name in names:
        require(name in CONTEXTUAL_FEATURES, f"contextual feature {name!r}: must be one of {', '.join(CONTEXTUAL_FEATURES)}")
    for table in ("item_id", "artist_id", "album_id", *names):
        require(table in table_rows, f"table_rows: no rows for {table!r}; add them")
        largest = store.manifest["largest"].get(table, -1)
        fix = f"raise table_rows[{table!r}] to at least {largest + 1}"
        require(
            largest < table_rows[table], f"table {table}: id {largest} in {store.path}, must be below its {table_rows[table]} rows; {fix}"
        )
