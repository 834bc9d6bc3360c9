import json
import pickle

import numpy as np
import pytest

from data.arrays import lengths_to_offsets, open_arrays, ranges, read_manifest, write_manifest
from data.history import HistoryConfig, gather, history_of
from data.index import AnchorIndex, IndexConfig
from data.schema import SKIP_ACTION, pack_code
from data.store import EventStore
from data.verify import main

ARRAYS = ["code", "item", "item_album", "item_artist", "played_ratio", "time", "uids", "user_offsets"]
ROWS = [(uid, 1000 * tick, 10 * uid + tick % 5, "listen", 60) for uid in (1, 2, 3) for tick in range(9)]


@pytest.fixture
def store(make_store):
    return make_store(ROWS)


def test_offsets_pass_two_to_the_31():
    offsets = lengths_to_offsets(np.array([2**30] * 3, dtype=np.int32))
    assert offsets.dtype == np.int64 and offsets.tolist() == [0, 2**30, 2**31, 3221225472]
    assert lengths_to_offsets(np.zeros(0, dtype=np.int32)).tolist() == [0]


def test_ranges():
    assert ranges(np.array([5, 2, 9]), np.array([7, 2, 12])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([2**40]), np.array([2**40 + 2])).tolist() == [2**40, 2**40 + 1]


def test_offsets_survive_a_round_trip(tmp_path):
    np.save(tmp_path / "offsets.npy", lengths_to_offsets(np.array([3_000_000_000, 1_763_272_693])))
    write_manifest(tmp_path, "test", {})
    found = open_arrays(tmp_path, read_manifest(tmp_path, "test"))["offsets"]
    assert found.dtype == np.int64 and found.tolist() == [0, 3_000_000_000, 4_763_272_693]


def test_every_offset_in_a_store_is_int64(store):
    index = AnchorIndex.open(store, IndexConfig(1))
    assert {array.dtype for array in (store.user_offsets, index.positions, index.window_offsets, index.counts)} == {np.dtype(np.int64)}


def test_a_store_of_five_billion_events(tmp_path):
    """Sparse files: only the last user's few events take space."""
    events, first = 5_000_000_000, 5_000_000_000 - 200
    columns = {
        name: np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", kind, (events,)) for name, kind in (("code", "u1"), ("item", "<u4"))
    }
    columns["code"][first:] = pack_code(np.zeros(200, np.uint8), np.zeros(200, np.uint8), np.zeros(200))
    columns["item"][first:] = np.arange(200)
    store = EventStore(
        path=tmp_path,
        manifest={},
        time=columns["item"],
        played_ratio=columns["code"],
        user_offsets=np.array([0, first, events]),
        uids=np.array([1, 2], dtype=np.uint32),
        item_artist=np.zeros(1, np.uint32),
        item_album=np.zeros(1, np.uint32),
        **columns,
    )
    assert store.num_events == 5_000_000_000
    anchors = np.array([events - 1, events - 50])
    assert store.user_of(anchors).tolist() == [1, 1]
    found = gather(store, anchors, HistoryConfig(length=30))
    for place, anchor in enumerate(anchors):
        tokens = found.token_event[10 * place : 10 * (place + 1)]
        assert (
            found.events[tokens].tolist()
            == list(range(anchor - 10, anchor))
            == history_of(store, anchor, HistoryConfig(length=30)).tolist()
        )
        assert store.item[found.events[tokens]].tolist() == list(range(anchor - first - 10, anchor - first))
    assert (store.code[found.events] >> 4 == SKIP_ACTION).all()


@pytest.mark.parametrize("name", ARRAYS)
def test_a_file_that_lacks_a_byte_is_named(store, capsys, name):
    path = store.path / f"{name}.npy"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{path}: {size - 1} bytes, expected {size}"):
        EventStore.open(store.path)
    for quick in ([], ["--quick"]):
        assert main([str(store.path), *quick]) == 1
        error = capsys.readouterr().err
        assert str(path) in error and error.count("\n") == 1
    path.unlink()
    with pytest.raises(ValueError, match=f"{path}: missing, expected {size} bytes"):
        EventStore.open(store.path)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_is_found_by_the_full_check(store, capsys, name):
    path = store.path / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main([str(store.path), "--quick"]) == 0
    assert main([str(store.path)]) == 1
    assert f"{path}: sha256" in capsys.readouterr().err


def test_a_good_store_verifies_in_one_line(store, capsys):
    assert main([str(store.path)]) == 0
    assert capsys.readouterr().out == f"{store.path}: ok, 10 files\n"


def test_another_type_of_the_same_size_is_named(store):
    np.save(store.path / "item.npy", store.item.astype(np.int32))
    with pytest.raises(ValueError, match=r"item.npy: dtype and shape \('<i4', \[27\]\), expected \('<u4', \[27\]\)"):
        EventStore.open(store.path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text[:-40], "damaged"),
        (lambda text: text.replace('"event store"', '"shop"'), "not the manifest of a event store"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "format version 7, expected 1"),
        (lambda text: text.replace("time.npy", "clock.npy"), "differs in"),
    ],
)
def test_a_wrong_manifest_is_named(store, capsys, damage, message):
    path = store.path / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        EventStore.open(store.path)
    assert main([str(store.path)]) == 1 and str(path) in capsys.readouterr().err


def test_a_folder_without_a_store_is_named(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "python -m data.prepare" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["positions", "window_offsets"])
def test_a_damaged_index_is_named(store, capsys, name):
    path = next(store.path.glob(f"index/*/{name}.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    assert main([str(store.path)]) == 1 and str(path) in capsys.readouterr().err
    with pytest.raises(ValueError, match=str(path)):
        AnchorIndex.open(store, IndexConfig(1))


def test_an_index_of_another_store_is_refused(store, make_store, capsys):
    other = make_store(ROWS[:-1])
    folder = next((other.path / "index").iterdir())
    folder.rename(folder.parent / "old")
    next((store.path / "index").iterdir()).rename(folder)
    with pytest.raises(ValueError, match=f"{folder}: made from another store; delete it"):
        AnchorIndex.open(other, IndexConfig(1))
    assert main([str(other.path)]) == 1 and str(folder) in capsys.readouterr().err


def test_pickling_maps_the_files_again(store):
    index = AnchorIndex.open(store, IndexConfig(1))
    pickled = pickle.dumps((store, index))
    assert len(pickled) < 1000
    again, again_index = pickle.loads(pickled)
    assert np.array_equal(again.item, store.item) and np.array_equal(again_index.positions, index.positions)


def test_manifest_records_the_source(store):
    source = json.loads((store.path / "manifest.json").read_text())["source"]
    assert source["multi_event.parquet"]["rows"] == 28 and source["album_item_mapping.parquet"]["bytes"] > 0
