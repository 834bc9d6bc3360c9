"""Raw parquet files: found, checked, and read in chunks. Nothing passes that training could misread."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.checks import require
from data.schema import DATASETS, EVENT_TYPES, EVENTS_FILE, MAX_ID

CHUNK_ROWS = 1 << 19
MAX_RATIO = 2**16 - 1


def find_events(folder: Path, dataset: str | None) -> tuple[Path, str]:
    """The event file under `folder` and its size's name ("custom" where nothing tells).

    It is folder/multi_event.parquet or in one of folder/{raw,flat,.}/<size>. Raises ValueError where there is none, or several.
    """
    require(dataset is None or dataset in DATASETS, f"dataset={dataset!r}: must be one of {', '.join(DATASETS)}")
    sizes = DATASETS.values() if dataset is None else [DATASETS[dataset]]
    named = [(folder / sub / size / EVENTS_FILE, size) for size in sizes for sub in ("raw", "flat", ".")]
    places = [(folder / EVENTS_FILE, "custom" if dataset is None else DATASETS[dataset]), *named]
    found = [place for place in places if place[0].is_file()]
    require(len(found) > 0, f"{folder / EVENTS_FILE}: no such file, nor is there one under {folder}/raw/<size>; download it first")
    paths = ", ".join(str(path) for path, _ in found)
    require(len(found) == 1, f"{folder}: several event files ({paths}); choose with --dataset or a deeper --raw")
    return found[0]


def find_mapping(folder: Path, events: Path, name: str) -> Path:
    """The mapping file `name`: in `folder`, in folder/shared_metadata, or beside the event file. Raises ValueError where there is none."""
    places = [folder / name, folder / "shared_metadata" / name, events.parent / name]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"{places[0]}: no such file; download it first")


class RawTable:
    """A parquet file whose columns are there and have sensible types.

    columns: name -> what the values must be: "id" an integer in [0, 2**31), "flag" 0 or 1, "ratio" a percentage in [0, 65535] or null,
    "event_type" one of EVENT_TYPES or its code, "unread" a number that must be there for the file to be Yambda's, and is not read.
    Raises ValueError with file, column and rule.
    """

    def __init__(self, path: Path, columns: dict[str, str]):
        self.path, self.columns = path, columns
        require(path.is_file(), f"{path}: no such file; download it first")
        with _readable(path):
            self._file = pq.ParquetFile(path)
        self.num_rows: int = self._file.metadata.num_rows
        schema = self._file.schema_arrow
        for name, kind in columns.items():
            require(name in schema.names, f"{path}: column {name} is missing; found {', '.join(schema.names)}")
            found = schema.field(name).type
            require(_fits(found, kind), f"{path}: column {name} is of type {found}, must be {_WANTED[kind]}")

    @property
    def fractional_ratio(self) -> bool:
        """Whether the played ratio is stored in floating point."""
        return pa.types.is_floating(self._file.schema_arrow.field("played_ratio_pct").type)

    def chunks(self, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
        """The checked values of some columns, CHUNK_ROWS rows at a time, in file order.

        Ids and flags are int64, event types uint8 codes, ratios uint16 (float32 where the file's are in floating point), 0 if missing.
        """
        row = 0
        batches = self._file.iter_batches(batch_size=CHUNK_ROWS, columns=names)
        while True:
            with _readable(self.path):
                batch = next(batches, None)
            if batch is None:
                break
            yield {name: self._values(name, batch.column(name), row) for name in names}
            row += batch.num_rows
        require(row == self.num_rows, f"{self.path}: {row} rows, its footer says {self.num_rows}; download it again")

    def _values(self, name: str, column: pa.Array, row: int) -> np.ndarray:
        kind = self.columns[name]
        if kind == "ratio":
            values = np.nan_to_num(column.fill_null(0).to_numpy(zero_copy_only=False), nan=0.0, posinf=np.inf, neginf=-np.inf)
            self._check(name, row, values, (values >= 0) & (values <= MAX_RATIO), f"must be in [0, {MAX_RATIO}] or null")
            return values.astype(np.float32 if self.fractional_ratio else np.uint16)
        if column.null_count:
            raise ValueError(f"{self.path}: column {name}, row {row + int(np.argmax(column.is_null()))}: null; every event needs a value")
        if kind == "event_type" and not pa.types.is_integer(column.type):
            return self._encoded(name, column, row)
        values = column.to_numpy(zero_copy_only=False)
        limit, rule = {
            "id": (MAX_ID, f"must be in [0, {MAX_ID}]"),
            "flag": (1, "must be 0 or 1"),
            "event_type": (len(EVENT_TYPES) - 1, "must be a code in [0, 4]: " + ", ".join(EVENT_TYPES)),
        }[kind]
        self._check(name, row, values, (values >= 0) & (values <= limit), rule)
        return values.astype(np.uint8 if kind == "event_type" else np.int64)

    def _encoded(self, name: str, column: pa.Array, row: int) -> np.ndarray:
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        words = np.array(column.dictionary.to_pylist(), dtype=object)
        codes = np.array([EVENT_TYPES.index(word) if word in EVENT_TYPES else 255 for word in words], dtype=np.uint8)
        indices = column.indices.to_numpy()
        self._check(name, row, words[indices], codes[indices] != 255, f"must be one of {', '.join(EVENT_TYPES)}")
        return codes[indices]

    def _check(self, name: str, row: int, values: np.ndarray, good: np.ndarray, rule: str) -> None:
        if not good.all():
            first = int(np.argmin(good))
            raise ValueError(f"{self.path}: column {name}, row {row + first}: {str(values[first])!r} {rule}")


_WANTED = {
    "id": "an integer",
    "flag": "an integer or a boolean",
    "ratio": "a number",
    "unread": "a number",
    "event_type": "a string or an integer",
}


def _fits(found: pa.DataType, kind: str) -> bool:
    types = pa.types
    if kind == "event_type":
        word = found.value_type if types.is_dictionary(found) else found
        return types.is_string(word) or types.is_large_string(word) or types.is_integer(found)
    number = types.is_integer(found)
    return number or (kind == "flag" and types.is_boolean(found)) or (kind in ("ratio", "unread") and types.is_floating(found))


class _readable:
    """Turns pyarrow's complaints inside the block into a ValueError that names the file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, (pa.ArrowException, OSError)):
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(f"{self.path}: not a complete parquet file ({reason}); download it again") from error
        return False
