"""Raw files in Yambda's schema, row by row."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GOLDEN = Path(__file__).parents[1] / "golden" / "yambda_tiny"
END = 30 * 86400  # the last timestamp of `write_raw`, which no split ever keeps


def raw_columns(rows: list[tuple]) -> dict:
    """Columns from (uid, timestamp, item, event type, played ratio) and, at will, is_organic; a closing event at END is added."""
    rows = [(*row, 0)[:6] for row in [*rows, (1, END, 1, "listen", 100)]]
    uid, time, item, kind, ratio, organic = (list(column) for column in zip(*rows, strict=True))
    return {
        "uid": pa.array(uid, pa.uint32()),
        "timestamp": pa.array(time, pa.uint32()),
        "item_id": pa.array(item, pa.uint32()),
        "is_organic": pa.array(organic, pa.uint8()),
        "played_ratio_pct": pa.array(ratio, pa.uint16()),
        "track_length_seconds": pa.array([200] * len(rows), pa.uint32()),
        "event_type": pa.array(kind, pa.string()),
    }


def write_raw(folder: Path, rows: list[tuple], num_items: int = 100, **replaced) -> Path:
    """Raw files of these rows; `replaced` columns are written instead of, or (None) left out of, the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: column for name, column in (raw_columns(rows) | replaced).items() if column is not None}
    pq.write_table(pa.table(columns), folder / "multi_event.parquet", row_group_size=7)
    for kind, step in (("artist", 3), ("album", 2)):
        items = np.arange(num_items, dtype=np.uint32)
        table = pa.table({"item_id": items, f"{kind}_id": (items // step).astype(np.uint32)})
        pq.write_table(table, folder / f"{kind}_item_mapping.parquet")
    return folder


def random_rows(rng: np.random.Generator, users: int, events: int, days: int = 20, first_uid: int = 1) -> list[tuple]:
    """Listens, likes and other events at 5-second ticks, with ties, in random file order."""
    n = users * events
    kind = rng.choice(["listen", "like", "dislike", "unlike"], size=n, p=[0.8, 0.1, 0.05, 0.05])
    ratio = [int(value) if name == "listen" else None for name, value in zip(kind, rng.integers(0, 130, n), strict=True)]
    uid = np.repeat(np.arange(first_uid, first_uid + users), events)
    time = rng.integers(0, days * 17280, n) // 50 * 250
    columns = [uid.tolist(), time.tolist(), rng.integers(0, 120, n).tolist(), kind.tolist(), ratio, rng.integers(0, 2, n).tolist()]
    rows = list(zip(*columns, strict=True))
    return [rows[place] for place in rng.permutation(n)]
