"""Raw Yambda files -> event store + index: `python -m data.prepare --raw DIR --out DIR`.

Rules, the benchmark's: training events lie in [test_start - gap - train_days, test_start - gap), where test_start is the last timestamp
less test_days. Users ascend, a user's events are sorted by time, and events of one time keep the order of the file. Nothing is dropped
inside the interval: exact copies of a row stay, and are counted. A missing played ratio counts as 0; ratios over 100 stay.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.arrays import MANIFEST, ColumnWriter, lengths_to_offsets, read_manifest, staged_folder, write_manifest
from data.buckets import MAX_BUCKETS, SORT_BYTES, UserBuckets, count_duplicates, count_sessions, record_dtype
from data.checks import check_fields, require
from data.cli import Parser, run_command
from data.index import AnchorIndex, IndexConfig
from data.raw import RawTable, find_events, find_mapping
from data.schema import DATASETS, EVENT_COLUMNS, pack_code
from data.store import KIND, EventStore

GIB = 2**30
BASE_BYTES = 512 * 2**20  # interpreter, libraries and one chunk of rows
UID_BYTES, ITEM_BYTES = 40, 8  # counts of each uid; artist and album of each item
SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class SplitConfig:
    """Which events are for training. Lengths of the train interval and of the test interval in days, of the gap between them in minutes;
    a session ends before a gap of more than session_gap_seconds (sessions are counted, nothing else)."""

    train_days: int = 300
    gap_minutes: int = 30
    test_days: int = 1
    session_gap_seconds: int = 1800

    def __post_init__(self):
        check_fields(self)
        for name, least in (("train_days", 1), ("gap_minutes", 0), ("test_days", 0), ("session_gap_seconds", 0)):
            require(getattr(self, name) >= least, f"SplitConfig.{name}={getattr(self, name)}: must be at least {least}")

    def boundaries(self, t_max: int) -> dict[str, int]:
        """Starts and exclusive ends of the train and test intervals in seconds, from the last timestamp of all events."""
        test_start = t_max - self.test_days * SECONDS_PER_DAY
        train_end = test_start - self.gap_minutes * 60
        return {
            "train_start": train_end - self.train_days * SECONDS_PER_DAY,
            "train_end": train_end,
            "test_start": test_start,
            "test_end": t_max,
        }


@dataclass(frozen=True, eq=False)
class EventCounts:
    """What one look at users and times tells. train, test: int64 [largest uid + 1], events of each uid in either interval."""

    t_min: int
    t_max: int
    boundaries: dict[str, int]
    train: np.ndarray
    test: np.ndarray


def prepare(
    raw: str | Path,
    out: str | Path,
    *,
    dataset: str | None = None,
    memory_gib: float = 8.0,
    split: SplitConfig | None = None,
    index: IndexConfig | None = None,
    log: Callable[[str], None] = print,
) -> EventStore:
    """Make the folder `out` from the raw files under `raw`; a store that is there already is replaced when the new one is complete.

    memory_gib: bound on memory. Raises ValueError, and leaves `out` as it was, where the input breaks a rule or the bound is too low.
    """
    raw, out, split, index = Path(raw), Path(out), split or SplitConfig(), index or IndexConfig()
    require(memory_gib > 0, f"memory_gib={memory_gib}: must be positive")
    path, size = find_events(raw, dataset)
    events = RawTable(path, EVENT_COLUMNS)
    mappings = {
        kind: RawTable(find_mapping(raw, path, f"{kind}_item_mapping.parquet"), {"item_id": "id", f"{kind}_id": "id"})
        for kind in ("artist", "album")
    }
    _check_target(out)
    counts = count_events(events, split, memory_gib)
    num_events = int(counts.train.sum())
    interval = f"[{counts.boundaries['train_start']}, {counts.boundaries['train_end']})"
    require(num_events > 0, f"{path}: no event in the train interval {interval} s, the last is at {counts.t_max} s; use more days of data")
    maps, largest = read_maps(mappings, memory_gib)
    bucket_events = _bucket_events(memory_gib, counts, len(maps["artist"]))
    with staged_folder(out, replace=True) as stage:
        facts = write_columns(stage, events, counts, split, bucket_events)
        for kind, values in maps.items():
            np.save(stage / f"item_{kind}.npy", values)
        users = np.flatnonzero(counts.train)
        np.save(stage / "uids.npy", users.astype(np.uint32))
        np.save(stage / "user_offsets.npy", lengths_to_offsets(counts.train[users]))
        tables = [events, *mappings.values()]
        manifest = {
            "source": {table.path.name: {"bytes": table.path.stat().st_size, "rows": table.num_rows} for table in tables},
            "split": _split_facts(size, counts, split) | {"num_sessions": facts["sessions"], "num_users": len(users)},
            "largest": largest | {"uid": int(users[-1]), "item_id": facts["largest_item"]},
            "num_duplicates": facts["duplicates"],
        }
        write_manifest(stage, KIND, manifest)
        anchors = AnchorIndex.open(EventStore.open(stage), index)
        dropped = events.num_rows - num_events
        log(f"{path}: {events.num_rows:,} rows, {num_events:,} kept for training, {dropped:,} outside the train interval {interval} s")
        log(f"{len(users):,} users; {facts['duplicates']:,} exact copies of another row, kept")
        log(f"{anchors.num_anchors:,} anchors in {anchors.num_windows} windows (min_history {index.min_history}, {index.window_seconds} s)")
        if anchors.num_anchors == 0:
            log(f"nothing to train on: {anchors.describe()}; prepare with a smaller --min_history")
    log(f"{out}: ready")
    return EventStore.open(out)


def count_events(events: RawTable, split: SplitConfig, memory_gib: float) -> EventCounts:
    """Times and users of all rows: one pass over the time column for the boundaries, one over users and times."""
    require(events.num_rows > 0, f"{events.path}: no rows; download it again")
    extremes = [(chunk["timestamp"].min(), chunk["timestamp"].max()) for chunk in events.chunks(["timestamp"]) if len(chunk["timestamp"])]
    t_min, t_max = int(min(low for low, _ in extremes)), int(max(high for _, high in extremes))
    boundaries = split.boundaries(t_max)
    totals = {"train": np.zeros(0, dtype=np.int64), "test": np.zeros(0, dtype=np.int64)}
    for chunk in events.chunks(["uid", "timestamp"]):
        uid, time = chunk["uid"], chunk["timestamp"]
        _require_memory(memory_gib, (int(uid.max(initial=0)) + 1) * UID_BYTES)
        for name, total in totals.items():
            inside = (time >= boundaries[f"{name}_start"]) & (time < boundaries[f"{name}_end"])
            found = np.bincount(uid[inside], minlength=len(total))
            found[: len(total)] += total
            totals[name] = found
    length = max(len(total) for total in totals.values())
    padded = {name: np.pad(total, (0, length - len(total))) for name, total in totals.items()}
    return EventCounts(t_min, t_max, boundaries, **padded)


def read_maps(mappings: dict[str, RawTable], memory_gib: float) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Artist and album by item id, uint32 of equal length, 0 where there is none; and the largest id of each kind.

    Where an item has several rows the last one counts.
    """
    length = 0
    for table in mappings.values():
        for chunk in table.chunks(["item_id"]):
            length = max(length, int(chunk["item_id"].max(initial=-1)) + 1)
    require(length > 0, f"{mappings['artist'].path}: no rows, and none in the album mapping; download them again")
    _require_memory(memory_gib, length * ITEM_BYTES)
    maps = {}
    for kind, table in mappings.items():
        values = np.zeros(length, dtype=np.uint32)
        for chunk in table.chunks(["item_id", f"{kind}_id"]):
            values[chunk["item_id"]] = chunk[f"{kind}_id"]
        maps[kind] = values
    return maps, {f"{kind}_id": int(values.max()) for kind, values in maps.items()}


def write_columns(stage: Path, events: RawTable, counts: EventCounts, split: SplitConfig, bucket_events: int) -> dict[str, int]:
    """Write item, time, code and played_ratio; the numbers of duplicates and sessions, and the largest item id."""
    ratio = np.dtype("<f4" if events.fractional_ratio else "<u2")
    dtype = record_dtype(ratio)
    buckets = UserBuckets(stage, counts.train, bucket_events, dtype)
    start, end = counts.boundaries["train_start"], counts.boundaries["train_end"]
    for chunk in events.chunks(["uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "event_type"]):
        kept = (chunk["timestamp"] >= start) & (chunk["timestamp"] < end)
        chunk = {name: values[kept] for name, values in chunk.items()}
        records = np.empty(int(kept.sum()), dtype=dtype)
        records["uid"], records["time"], records["item"] = chunk["uid"], chunk["timestamp"], chunk["item_id"]
        records["code"] = pack_code(chunk["event_type"], chunk["is_organic"], chunk["played_ratio_pct"])
        records["ratio"] = chunk["played_ratio_pct"]
        buckets.add(records)
    total = int(counts.train.sum())
    columns = {"item": np.uint32, "time": np.uint32, "code": np.uint8, "ratio": ratio}
    file_of = {name: stage / f"{name}.npy" for name in columns} | {"ratio": stage / "played_ratio.npy"}
    writers = {name: ColumnWriter(file_of[name], kind, total) for name, kind in columns.items()}
    facts = {"duplicates": 0, "sessions": 0, "largest_item": 0}
    for records in buckets.sorted():
        for name, writer in writers.items():
            writer.append(records[name])
        facts["duplicates"] += count_duplicates(records)
        facts["sessions"] += count_sessions(records, split.session_gap_seconds)
        facts["largest_item"] = max(facts["largest_item"], int(records["item"].max(initial=0)))
    for writer in writers.values():
        writer.close()
    return facts


def _split_facts(size: str, counts: EventCounts, split: SplitConfig) -> dict:
    intervals = {"size": size, "t_min": counts.t_min, "t_max": counts.t_max} | counts.boundaries
    settings = {name: getattr(split, name) for name in ("train_days", "gap_minutes", "test_days", "session_gap_seconds")}
    test_events = int(counts.test[counts.train > 0].sum())  # of users that are trained on
    return intervals | settings | {"num_train_events": int(counts.train.sum()), "num_test_events": test_events}


def _bucket_events(memory_gib: float, counts: EventCounts, num_items: int) -> int:
    """Events of a bucket for which sorting stays within `memory_gib`; ValueError with the number that is needed where none do."""
    fixed = len(counts.train) * UID_BYTES + num_items * ITEM_BYTES
    largest_user, total = int(counts.train.max()), int(counts.train.sum())
    least = min(total, largest_user + -(-total // MAX_BUCKETS))  # a bucket may overshoot by one user
    _require_memory(memory_gib, fixed + least * SORT_BYTES)
    fitting = int((memory_gib * GIB - BASE_BYTES - fixed) // SORT_BYTES)
    return max(1, total if fitting >= total else fitting - largest_user)


def _require_memory(memory_gib: float, needed_bytes: int) -> None:
    needed = math.ceil((BASE_BYTES + needed_bytes) / GIB * 100) / 100
    require(memory_gib >= needed, f"memory_gib={memory_gib:g}: these files need at least {needed:.2f} GiB; raise --memory_gib")


def _check_target(out: Path) -> None:
    require(not out.exists() or out.is_dir(), f"out={out}: must be a folder; give another path")
    if out.is_dir() and any(out.iterdir()):
        try:
            read_manifest(out, KIND)
        except ValueError:
            raise ValueError(f"out={out}: holds something else than an event store (no valid {MANIFEST}); give another folder") from None


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status: 0, or 2 after one line about what to fix."""
    parser = Parser(prog="python -m data.prepare", description="Make an event store and its anchor index from raw Yambda files.")
    parser.add_argument("--raw", required=True, type=Path, help="folder with multi_event.parquet (or raw/<size>/...) and the two mappings")
    parser.add_argument("--out", required=True, type=Path, help="folder of the store")
    parser.add_argument("--dataset", choices=sorted(DATASETS), help="which data set, where the folder holds several")
    parser.add_argument("--memory_gib", type=float, default=8.0, help="bound on memory, GiB")
    parser.add_argument("--train_days", type=int, default=300, help="length of the train interval")
    parser.add_argument("--gap_minutes", type=int, default=30, help="gap between train and test interval")
    parser.add_argument("--test_days", type=int, default=1, help="length of the test interval")
    parser.add_argument("--min_history", type=int, default=4086, help="earlier events an anchor needs")
    parser.add_argument("--window_seconds", type=int, default=86400, help="length of a window")
    options = parser.parse_args(arguments)

    def command() -> None:
        split = SplitConfig(options.train_days, options.gap_minutes, options.test_days)
        index = IndexConfig(min_history=options.min_history, window_seconds=options.window_seconds)
        prepare(options.raw, options.out, dataset=options.dataset, memory_gib=options.memory_gib, split=split, index=index)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
