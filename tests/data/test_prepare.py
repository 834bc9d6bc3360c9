import hashlib
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import END, random_rows, raw_columns, write_raw

from data import prepare as prepare_module
from data.buckets import UserBuckets, record_dtype
from data.history import HistoryConfig
from data.index import AnchorIndex, IndexConfig
from data.loader import YambdaDataset
from data.prepare import main, prepare
from data.store import EventStore

ROWS = [(uid, 1000 * tick, 10 * uid + tick % 5, "listen", 60) for uid in (1, 2, 3) for tick in range(9)]
TRAIN_END = END - 86400 - 1800


def quiet(line: str) -> None:
    pass


def hashes(folder) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_ties_keep_file_order_and_a_rerun_gives_the_same_bytes(tmp_path):
    rows = [(2, 500, 5, "listen", 60), (1, 100, 9, "listen", 60), (1, 100, 2, "like", None), (2, 5, 8, "listen", 60)]
    rows += [(1, 95, 3, "listen", 60), (1, 100, 7, "listen", 20), (2, 100, 1, "listen", 60), (1, 100, 1, "listen", 60)]
    raw = write_raw(tmp_path / "raw", rows)
    store = prepare(raw, tmp_path / "a", log=quiet)
    assert store.item.tolist() == [3, 9, 2, 7, 1, 8, 1, 5]
    first = hashes(tmp_path / "a")
    prepare(raw, tmp_path / "a", log=quiet)
    prepare(raw, tmp_path / "b", log=quiet)
    assert first == hashes(tmp_path / "a") == hashes(tmp_path / "b") and "manifest.json" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "raw"]


def test_exact_copies_are_kept_and_counted(tmp_path, capsys):
    rows = [(1, 100, item, "listen", 60) for item in (4, 5, 4, 6, 5, 7, 8)] + [(1, 200, 4, "listen", 60), (2, 100, 4, "listen", 60)]
    assert main(["--raw", str(write_raw(tmp_path / "raw", rows)), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "10 rows, 9 kept for training" in said and "2 exact copies of another row, kept" in said
    store = EventStore.open(tmp_path / "out")
    assert store.item.tolist() == [4, 5, 4, 6, 5, 7, 8, 4, 4] and store.manifest["num_duplicates"] == 2


def test_train_interval_is_half_open_and_the_gap_is_left_out(tmp_path):
    times = {TRAIN_END - 1: 1, TRAIN_END: 2, TRAIN_END + 1799: 3, TRAIN_END + 1800: 4, END - 1: 5}
    rows = [(1, time, item, "listen", 60) for time, item in times.items()] + [(9, TRAIN_END + 1800, 6, "listen", 60)]
    store = prepare(write_raw(tmp_path / "raw", rows), tmp_path / "out", log=quiet)
    assert store.item.tolist() == [1]
    assert store.manifest["split"]["num_test_events"] == 2  # user 9 is in no training event
    start = TRAIN_END - 2 * 86400
    rows = [(1, start - 1, 1, "listen", 60), (1, start, 2, "listen", 60)]
    split = prepare_module.SplitConfig(train_days=2)
    assert prepare(write_raw(tmp_path / "raw", rows), tmp_path / "out", split=split, log=quiet).item.tolist() == [2]


def test_a_session_ends_before_a_gap_of_more_than_30_minutes(tmp_path):
    rows = [(uid, time, 1, "listen", 60) for uid, times in {1: [0, 1800, 3601], 2: [3601, 5401], 3: [5402]}.items() for time in times]
    store = prepare(write_raw(tmp_path / "raw", rows), tmp_path / "out", log=quiet)
    assert store.manifest["split"]["num_sessions"] == 4


def test_later_events_leave_earlier_samples_as_they_are(tmp_path):
    rng = np.random.default_rng(3)
    rows, cut = random_rows(rng, 4, 60), 10 * 86400
    later = [(uid, cut + 500 * place, 7, "listen", 60) for place, uid in enumerate([1, 2, 3, 4] * 20)]
    samples = []
    for name, content in (("past", [row for row in rows if row[1] < cut]), ("all", rows + later)):
        store = prepare(write_raw(tmp_path / name, content), tmp_path / f"{name}_store", index=IndexConfig(2), log=quiet)
        dataset = YambdaDataset(store, HistoryConfig(length=12), 2)
        anchors = np.sort(AnchorIndex.open(store, IndexConfig(2)).positions)
        samples.append([dataset.sample_at(int(position)) for position in anchors if store.time[position] < cut])
    assert len(samples[0]) == len(samples[1]) > 50
    for one, other in zip(*samples, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_sorting_in_buckets_equals_sorting_at_once(tmp_path, monkeypatch):
    rows = random_rows(np.random.default_rng(7), 9, 70, first_uid=40)
    raw = write_raw(tmp_path / "raw", rows)
    monkeypatch.setattr("data.raw.CHUNK_ROWS", 33)
    whole = prepare(raw, tmp_path / "whole", log=quiet)
    monkeypatch.setattr(prepare_module, "_bucket_events", lambda *_: 100)
    prepare(raw, tmp_path / "buckets", log=quiet)
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "buckets")
    slow = sorted((row for row in rows if row[1] < TRAIN_END), key=lambda row: row[:2])  # sorted is stable
    columns = whole.reference_columns()
    assert list(zip(columns["flat_uid"], columns["flat_timestamps"], whole.item, strict=True)) == [row[:3] for row in slow]


def test_a_bucket_overshoots_by_one_user_at_most(tmp_path):
    counts = np.array([0, 30, 5, 0, 80, 1, 1])
    buckets = UserBuckets(tmp_path, counts, 20, record_dtype(np.dtype("<u2")))
    events = np.zeros(int(counts.sum()), dtype=record_dtype(np.dtype("<u2")))
    events["uid"] = np.random.default_rng(0).permutation(np.repeat(np.arange(7), counts))
    buckets.add(events)
    found = list(buckets.sorted())
    assert max(len(part) for part in found) <= 20 + 80 and len(found) > 2
    assert np.array_equal(np.concatenate(found)["uid"], np.sort(events["uid"])) and not list(tmp_path.iterdir())


def test_memory_bound_is_refused_with_a_number_that_suffices(tmp_path, monkeypatch):
    raw = write_raw(tmp_path / "raw", ROWS)
    with pytest.raises(ValueError, match=r"memory_gib=0.1: these files need at least ([0-9.]+) GiB; raise") as refusal:
        prepare(raw, tmp_path / "out", memory_gib=0.1, log=quiet)
    assert not (tmp_path / "out").exists()
    enough = float(re.search(r"least ([0-9.]+) GiB", str(refusal.value))[1])
    assert prepare(raw, tmp_path / "out", memory_gib=enough, log=quiet).num_events == len(ROWS)
    monkeypatch.setattr(prepare_module, "SORT_BYTES", 2**24)
    with pytest.raises(ValueError, match="memory_gib=0.6: these files need at least 0.66 GiB"):  # one user's 9 events, and one more
        prepare(raw, tmp_path / "out", memory_gib=0.6, log=quiet)
    assert prepare(raw, tmp_path / "out", memory_gib=0.66, log=quiet).num_events == len(ROWS)
    far = write_raw(tmp_path / "far", [*ROWS, (2**31 - 1, 5, 5, "listen", 60)])
    with pytest.raises(ValueError, match="need at least 80"):  # 40 bytes for each of 2**31 uids
        prepare(far, tmp_path / "out", log=quiet)


def with_value(name: str, value, kind=None):
    """Column `name` of ROWS with one value replaced, in row 17 (the third row group)."""
    column = raw_columns(ROWS)[name]
    values = column.to_pylist()
    values[17] = value
    return {name: pa.array(values, kind or column.type)}


BAD_COLUMNS = {
    "null uid": (with_value("uid", None), "column uid, row 17: null"),
    "null timestamp": (with_value("timestamp", None), "column timestamp, row 17: null"),
    "null item": (with_value("item_id", None), "column item_id, row 17: null"),
    "null event type": (with_value("event_type", None), "column event_type, row 17: null"),
    "null flag": (with_value("is_organic", None), "column is_organic, row 17: null"),
    "negative uid": (with_value("uid", -4, pa.int64()), "column uid, row 17: '-4' must be in [0, 2147483647]"),
    "negative time": (with_value("timestamp", -5, pa.int64()), "column timestamp, row 17: '-5'"),
    "negative item": (with_value("item_id", -1, pa.int32()), "column item_id, row 17: '-1'"),
    "large item": (with_value("item_id", 2**31, pa.int64()), "column item_id, row 17: '2147483648'"),
    "flag": (with_value("is_organic", 2), "column is_organic, row 17: '2' must be 0 or 1"),
    "negative ratio": (with_value("played_ratio_pct", -1, pa.int16()), "column played_ratio_pct, row 17: '-1'"),
    "infinite ratio": (with_value("played_ratio_pct", float("inf"), pa.float32()), "column played_ratio_pct, row 17: 'inf'"),
    "unknown event": (with_value("event_type", "skip"), "column event_type, row 17: 'skip' must be one of listen, like, dislike"),
    "event code": (
        {"event_type": pa.array([0] * 17 + [5] + [0] * 10, pa.uint8())},
        "column event_type, row 17: '5' must be a code in [0, 4]",
    ),
    "string time": ({"timestamp": pa.array(["5"] * 28)}, "column timestamp is of type string, must be an integer"),
    "float uid": ({"uid": pa.array([1.0] * 28)}, "column uid is of type double, must be an integer"),
    **{f"no {name}": ({name: None}, f"column {name} is missing; found ") for name in raw_columns(ROWS)},
}


@pytest.mark.parametrize("replaced, message", BAD_COLUMNS.values(), ids=BAD_COLUMNS.keys())
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, replaced, message):
    raw = write_raw(tmp_path / "raw", ROWS, **replaced)
    assert main(["--raw", str(raw), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{raw}/multi_event.parquet: {message}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("name", ["multi_event", "artist_item_mapping", "album_item_mapping"])
@pytest.mark.parametrize("damage", ["missing", "cut at the end", "cut early", "pages"])
def test_damaged_files_are_named_and_write_nothing(tmp_path, capsys, name, damage):
    raw = write_raw(tmp_path / "raw", ROWS)
    path = raw / f"{name}.parquet"
    content = path.read_bytes()
    path.write_bytes(
        {"cut at the end": content[:-1], "cut early": content[:50], "pages": b"PAR1" + b"\xff" * 200 + content[204:]}.get(damage, b"")
    )
    if damage == "missing":
        path.unlink()
    assert main(["--raw", str(raw), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{name}.parquet: " in error
    assert ("no such file" if damage == "missing" else "not a complete parquet file") in error
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_an_error_leaves_the_old_store_in_place(tmp_path, capsys):
    raw, out = write_raw(tmp_path / "raw", ROWS), tmp_path / "out"
    prepare(raw, out, log=quiet)
    before = hashes(out)
    write_raw(raw, ROWS, **with_value("event_type", "skip"))
    assert main(["--raw", str(raw), "--out", str(out)]) == 2
    assert hashes(out) == before and len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_no_store_is_not_replaced(tmp_path, capsys):
    raw = write_raw(tmp_path / "raw", ROWS)
    assert main(["--raw", str(raw), "--out", str(raw)]) == 2
    assert "holds something else than an event store" in capsys.readouterr().err
    assert (raw / "multi_event.parquet").exists()
    assert main(["--raw", str(raw), "--out", str(raw / "multi_event.parquet")]) == 2
    assert "must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [pa.uint16(), pa.float64()])
def test_missing_and_large_ratios_are_data(tmp_path, kind):
    ratios = [None, 49, 50, 130, 0, None, 60]
    rows = [(1, 10 * place, place, "like" if place == 5 else "listen", 0) for place in range(7)]
    raw = write_raw(tmp_path / "raw", rows, played_ratio_pct=pa.array([*ratios, 100], kind))
    columns = prepare(raw, tmp_path / "out", log=quiet).reference_columns()
    assert columns["flat_played_ratio"].tolist() == [0, 49, 50, 130, 0, 0, 60]
    assert np.flatnonzero(columns["flat_is_listen_plus"]).tolist() == [2, 3, 6]
    assert np.flatnonzero(columns["flat_is_skip"]).tolist() == [0, 1, 4] and np.flatnonzero(columns["flat_is_like"]).tolist() == [5]


def test_a_fractional_ratio_just_below_the_threshold_is_a_skip(tmp_path):
    raw = write_raw(tmp_path / "raw", [(1, 5, 1, "listen", 0)], played_ratio_pct=pa.array([49.9, float("nan")]))
    columns = prepare(raw, tmp_path / "out", log=quiet).reference_columns()
    assert columns["flat_is_skip"].tolist() == [True] and columns["flat_played_ratio"].tolist() == [np.float32(49.9)]


def test_event_types_as_codes_or_categories_give_the_same_store(tmp_path):
    rows = random_rows(np.random.default_rng(1), 3, 40)
    words = raw_columns(rows)["event_type"]
    names = ["listen", "like", "dislike", "unlike", "undislike"]
    codes = pa.array([names.index(word) for word in words.to_pylist()], pa.int64())
    kinds = {"words": words, "codes": codes, "categories": words.dictionary_encode()}
    arrays = []
    for name, column in kinds.items():
        prepare(write_raw(tmp_path / name, rows, event_type=column), tmp_path / f"{name}_store", log=quiet)
        arrays.append({file: value for file, value in hashes(tmp_path / f"{name}_store").items() if file.endswith(".npy")})
    assert arrays[0] == arrays[1] == arrays[2]


def test_the_last_of_several_mapping_rows_counts(tmp_path):
    raw = write_raw(tmp_path / "raw", ROWS)
    pq.write_table(pa.table({"artist_id": [5, 6, 7, 8], "item_id": [3, 150, 3, 0]}), raw / "artist_item_mapping.parquet", row_group_size=2)
    store = prepare(raw, tmp_path / "out", log=quiet)
    assert store.num_items == 151 == len(store.item_album)
    assert store.item_artist[[0, 1, 3, 150]].tolist() == [8, 0, 7, 6] and store.item_album[[99, 150]].tolist() == [49, 0]
    assert store.manifest["largest"] == {"artist_id": 8, "album_id": 49, "uid": 3, "item_id": 34}


@pytest.mark.parametrize("place", ["raw/50m", "flat/50m", "50m"])
def test_named_data_sets_are_found_in_their_folders(tmp_path, place):
    raw = write_raw(tmp_path / "raw", ROWS)
    (raw / place).mkdir(parents=True)
    (raw / "multi_event.parquet").rename(raw / place / "multi_event.parquet")
    for dataset in (None, "yambda-50m"):
        assert prepare(raw, tmp_path / "out", dataset=dataset, log=quiet).manifest["split"]["size"] == "50m"
    with pytest.raises(ValueError, match="no such file"):
        prepare(raw, tmp_path / "out", dataset="yambda-5b", log=quiet)
