import numpy as np
import pytest

from data.features import DEFAULT_TABLE_ROWS, contextual_ids, hour_of_day, xxh64
from data.history import HistoryConfig
from data.loader import YambdaDataset

VECTORS = [
    ("user_x_artist", {"uid": 1, "artist_id": 2}, 28516524),
    ("user_x_album", {"uid": 1, "album_id": 2}, 28516524),
    ("user_x_hour", {"uid": 1, "hour_of_day": 2}, 20516524),
    ("item_x_hour", {"item_id": 9390623, "hour_of_day": 23}, 28146295),
    ("user_x_is_organic", {"uid": 1000000, "is_organic": 1}, 1160709),
    ("user_x_artist_x_hour", {"uid": 12345, "artist_id": 678, "hour_of_day": 9}, 33578425),
]


def test_xxh64_vector():
    assert xxh64(np.array([1]), np.array([2])).tolist() == [5411092459628516524]


@pytest.mark.parametrize("name, keys, wanted", VECTORS)
def test_cross_vectors(name, keys, wanted):
    keys = {"uid": np.array([0, 0]), **{key: np.array([77, value]) for key, value in keys.items()}}
    assert contextual_ids((name,), keys, DEFAULT_TABLE_ROWS)[0, 1] == wanted


def test_hour_of_day():
    assert hour_of_day(np.array([0, 3599, 3600, 86399, 86400, 26_000_000])).tolist() == [0, 0, 1, 23, 0, 22]


def test_defaults_are_the_models():
    from dlrm_hstu import config

    assert config.ModelConfig().table_rows == DEFAULT_TABLE_ROWS and sum(DEFAULT_TABLE_ROWS.values()) == 293_051_712


@pytest.mark.parametrize("table", ["item_id", "artist_id", "album_id", "uid"])
def test_an_id_beyond_its_table_is_named(random_store, table):
    largest = random_store.manifest["largest"][table]
    fitting = DEFAULT_TABLE_ROWS | {table: largest + 1}
    YambdaDataset(random_store, HistoryConfig(), 3, fitting)
    message = rf"table {table}: id {largest} .* must be below its {largest} rows; raise table_rows\['{table}'\] to at least {largest + 1}"
    with pytest.raises(ValueError, match=message):
        YambdaDataset(random_store, HistoryConfig(), 3, fitting | {table: largest})


def test_recorded_largest_ids_are_the_columns(random_store):
    columns = {
        "item_id": random_store.item,
        "artist_id": random_store.item_artist,
        "album_id": random_store.item_album,
        "uid": random_store.uids,
    }
    assert random_store.manifest["largest"] == {name: int(values.max()) for name, values in columns.items()}


def test_unknown_features_and_missing_tables_are_named(random_store):
    with pytest.raises(ValueError, match="contextual feature 'user_x_genre': must be one of uid, user_x_artist"):
        YambdaDataset(random_store, HistoryConfig(), 3, None, ("uid", "user_x_genre"))
    with pytest.raises(ValueError, match="table_rows: no rows for 'uid'"):
        YambdaDataset(random_store, HistoryConfig(), 3, {"item_id": 200, "artist_id": 200, "album_id": 200})
