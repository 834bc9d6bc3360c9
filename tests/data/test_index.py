import numpy as np
import pytest

from data.index import AnchorIndex, IndexConfig, UserSplit, main, shuffled, user_hash


def slow_windows(store, min_history: int, window_seconds: int) -> dict[int, list[int]]:
    columns = store.reference_columns()
    anchors = [
        p
        for p in range(store.num_events)
        if columns["flat_event_types"][p] == 0 and p - columns["user_start"][columns["flat_uid"][p]] >= min_history
    ]
    first = min(int(store.time[p]) for p in anchors)
    windows: dict[int, list[int]] = {}
    for p in anchors:
        windows.setdefault((int(store.time[p]) - first) // window_seconds, []).append(p)
    return windows


@pytest.mark.parametrize("chunk_events", [1, 200, 1 << 22])
@pytest.mark.parametrize("min_history, window_seconds", [(0, 86400), (3, 86400), (100, 7000), (149, 3600)])
def test_equals_the_definition(random_store, tmp_path, monkeypatch, chunk_events, min_history, window_seconds):
    monkeypatch.setattr("data.index.CHUNK_EVENTS", chunk_events)
    config = IndexConfig(min_history, window_seconds)
    folder = random_store.path / "index" / f"min_history{min_history}_window{window_seconds}"
    if folder.exists():
        folder.rename(tmp_path / "old")
    index = AnchorIndex.open(random_store, config)
    wanted = slow_windows(random_store, min_history, window_seconds)
    assert index.num_windows == max(wanted) + 1 and index.num_anchors == sum(map(len, wanted.values()))
    for window in range(index.num_windows):
        assert index.train(window).tolist() == wanted.get(window, [])
    assert index.t_min == random_store.time[index.positions].min() and index.t_max == random_store.time[index.positions].max()
    assert index.holdout().tolist() == wanted[max(wanted)]
    assert index.train_samples(range(0, index.num_windows)) == index.num_anchors


def test_opening_reads_a_slice_only(random_store):
    index = AnchorIndex.open(random_store, IndexConfig(3))
    assert isinstance(index.positions, np.memmap) and np.shares_memory(index.train(2), index.positions)


def test_every_train_anchor_is_before_every_holdout_anchor(random_store):
    index = AnchorIndex.open(random_store, IndexConfig(3))
    train = np.concatenate([index.train(window) for window in range(15)])
    assert random_store.time[train].max() < random_store.time[index.holdout(15, 3)].min()


def test_windows_that_do_not_exist_are_refused(random_store):
    index = AnchorIndex.open(random_store, IndexConfig(3))
    for first, count in ((-1, 1), (index.num_windows, 1), (0, index.num_windows + 1)):
        with pytest.raises(ValueError, match=rf"windows \[{first}, .* the data has windows 0 to {index.num_windows - 1} \(min_history 3"):
            index.holdout(first, count)


def test_user_split_parts_users(random_store):
    index, split = AnchorIndex.open(random_store, IndexConfig(3)), UserSplit(0.5, 3)
    windows = range(index.num_windows)
    train = np.concatenate([index.train(window, split) for window in windows])
    held = index.holdout(0, index.num_windows, split)
    users = [set(random_store.uids[random_store.user_of(part)]) for part in (train, held)]
    assert users[0] and users[1] and not users[0] & users[1]
    assert np.array_equal(np.sort(np.concatenate([train, held])), np.sort(index.positions))
    assert {uid for uid in range(1, 13) if user_hash(np.array([uid]), 3)[0] >= 0.5} == users[1]
    assert index.train_samples(windows, split) == len(train) and index.eval_samples(0, index.num_windows, split) == len(held)


def test_user_hash_vectors():
    vectors = {(0, 0): 0.8833108082136426, (1, 0): 0.5665615751722809, (2, 0): 0.5911897341980794}
    vectors |= {(1000000, 0): 0.4064500812937668, (1, 7): 0.6185046250316943, (1, -1): 0.8833108082136426}
    for (uid, salt), value in vectors.items():
        assert user_hash(np.array([uid], dtype=np.uint32), salt).tolist() == [value]
    assert UserSplit(0.9, 0).for_eval(np.arange(1, 1_000_001)).mean() == pytest.approx(0.099511, abs=1e-9)


def test_shuffle_vectors():
    anchors = np.arange(10)
    assert shuffled(anchors, 0.25, 3 + 2).tolist() == [0, 1, 3, 2, 4, 5, 7, 6, 8, 9]
    assert shuffled(anchors, 1.0, 3 + 2).tolist() == [7, 6, 1, 3, 2, 4, 0, 9, 5, 8]
    assert shuffled(anchors, 0.0, 5) is anchors and shuffled(anchors[:1], 1.0, 5).tolist() == [0]


def test_settings_without_an_anchor_give_an_empty_index(random_store):
    index = AnchorIndex.open(random_store, IndexConfig(5000))
    assert index.num_anchors == index.num_windows == 0
    with pytest.raises(
        ValueError, match="there is no anchor with min_history 5000, .* the longest history being 15[0-9]* events|1[0-9]{2} events"
    ):
        index.train(0)


@pytest.mark.parametrize("settings", [{"min_history": -1}, {"window_seconds": 0}, {"min_history": 2.5}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=f"IndexConfig.{next(iter(settings))}={next(iter(settings.values()))}"):
        IndexConfig(**settings)


def test_a_store_that_cannot_be_written_names_the_command(random_store, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(ValueError, match=r"Read-only file system.*python -m data.index .* --min_history 77 --window_seconds 86400"):
        AnchorIndex.open(random_store, IndexConfig(77))


def test_command_line_adds_an_index(random_store, capsys):
    assert main([str(random_store.path), "--min_history", "20"]) == 0
    assert "anchors in" in capsys.readouterr().out
    assert (random_store.path / "index" / "min_history20_window86400" / "manifest.json").is_file()


def test_a_second_builder_takes_the_first_ones_index(random_store, monkeypatch):
    """Two processes build at once: the slower one finds the folder there when it wants to rename its own."""
    from data import index as module

    build, config = module._build, IndexConfig(31)

    def slow_build(store, settings, folder):
        monkeypatch.setattr(module, "_build", build)
        AnchorIndex.open(store, settings)
        build(store, settings, folder)

    monkeypatch.setattr(module, "_build", slow_build)
    assert AnchorIndex.open(random_store, config).num_anchors > 0
    assert not list((random_store.path / "index").glob(".*"))
