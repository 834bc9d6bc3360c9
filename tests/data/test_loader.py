from dataclasses import replace

import numpy as np
import pytest
import torch

from data.history import HistoryConfig
from data.index import AnchorIndex, IndexConfig, shuffled
from data.loader import BatchLoader, StreamConfig, YambdaDataset, eval_batches, train_batches

STREAM = StreamConfig(start_window=2, num_windows=5, holdout_window=-1, holdout_num_windows=2)


@pytest.fixture(scope="module")
def data(random_store):
    return YambdaDataset(random_store, HistoryConfig(length=12), 3), AnchorIndex.open(random_store, IndexConfig(3))


class FixedOrder:
    """Windows given as lists."""

    def __init__(self, anchors: dict[int, np.ndarray]):
        self.by_window, self.windows = anchors, list(anchors)

    def count(self, window):
        return len(self.by_window[window])

    def anchors(self, window):
        return self.by_window[window]


def signature(batch) -> tuple:
    return tuple(value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in vars(batch).values())


def numbered(batches) -> list[int]:
    """Places in the window of real samples."""
    return [int(place) for batch in batches for place, weight in zip(batch.sample_index, batch.weight, strict=True) if weight]


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 7), (3, 4), (4, 50)])
def test_ranks_share_each_window_exactly(data, world_size, batch_size):
    dataset, index = data
    loaders = [train_batches(dataset, index, STREAM, batch_size, rank, world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    seen: dict[int, list[tuple[int, int]]] = {window: [] for window in range(2, 7)}
    steps = 0
    for batches in zip(*loaders, strict=True):
        window, number = loaders[0].state
        assert all(loader.state == (window, number) for loader in loaders)
        total, first = len(index.train(window)), (number - 1) * batch_size * world_size
        for rank, batch in enumerate(batches):
            place = first + rank + world_size * np.arange(batch_size)
            assert batch.sample_index.tolist() == place.tolist() and batch.weight.tolist() == (place < total).astype(float).tolist()
            assert batch.real_samples == (place < total).sum() and batch.global_real_samples == min(batch_size * world_size, total - first)
            real = [step for step in place if step < total]
            seen[window] += [(int(step), int(uid)) for step, uid in zip(real, batch.contextual_ids[0], strict=False)]
        assert sum(batch.real_samples for batch in batches) == batches[0].global_real_samples
        steps += 1
    assert steps == len(loaders[0]) and {loader.samples for loader in loaders} == {sum(len(samples) for samples in seen.values())}
    for window, samples in seen.items():
        uids = dataset.store.uids[dataset.store.user_of(index.train(window))]
        assert sorted(samples) == list(enumerate(uids.tolist()))


def test_a_rank_without_real_samples_still_gets_its_batch(data):
    dataset, index = data
    order = FixedOrder({3: index.train(3)[:2]})
    batches = [next(iter(BatchLoader(dataset, order, 2, rank, 4))) for rank in range(4)]
    assert [batch.real_samples for batch in batches] == [1, 1, 0, 0] and {batch.global_real_samples for batch in batches} == {2}
    wanted = dataset.batch(index.train(3)[[1, 1]], np.array([3, 7]), 0, 2)
    assert signature(batches[3]) == signature(replace(wanted, world_size=4))


def test_ten_samples_in_batches_of_four_three_times(data):
    dataset, index = data
    loader = BatchLoader(dataset, FixedOrder({19: index.positions[:10]}), 4)
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == 3 and numbered(batches) == list(range(10))
        assert sum(batch.real_samples for batch in batches) == 10 and [batch.batch_size for batch in batches] == [4, 4, 4]
        assert torch.cat([batch.sample_index for batch in batches]).unique().numel() == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_window_trains_and_every_evaluation_is_whole(data, num_workers):
    dataset, index = data
    stream = StreamConfig(start_window=2, num_windows=3, holdout_window=8, holdout_num_windows=2, num_workers=num_workers)
    evaluation = eval_batches(dataset, index, stream, 16)
    trained = {2: 0, 3: 0, 4: 0}
    train = train_batches(dataset, index, stream, 16)
    for batch in train:
        window, number = train.state
        trained[window] += batch.real_samples
        if number == train.batches[window]:
            next(iter(evaluation))  # one that is cut short leaves nothing behind
            assert numbered(evaluation) == list(range(index.eval_samples(8, 2)))
    assert trained == {window: len(index.train(window)) for window in trained}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_the_order_is_a_function_of_the_seed_only(data):
    dataset, index = data
    runs = {}
    for seed, workers in ((0, 0), (0, 1), (0, 4), (1, 0)):
        stream = StreamConfig(start_window=2, num_windows=3, holdout_window=9, shuffle_fraction=1.0, shuffle_seed=seed, num_workers=workers)
        runs[seed, workers] = [signature(batch) for batch in train_batches(dataset, index, stream, 8)]
    assert runs[0, 0] == runs[0, 1] == runs[0, 4] != runs[1, 0]
    assert len(set(runs[0, 0])) == len(runs[0, 0])


def test_shuffling_follows_the_published_order(data):
    dataset, index = data
    stream = StreamConfig(start_window=2, num_windows=1, holdout_window=9, shuffle_fraction=0.25, shuffle_seed=3)
    anchors = shuffled(index.train(2), 0.25, 3 + 2)
    uids = torch.cat([batch.contextual_ids[0] for batch in train_batches(dataset, index, stream, 1)])
    assert uids.tolist() == dataset.store.uids[dataset.store.user_of(anchors)].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_anywhere_continues_the_stream(data, num_workers):
    dataset, index = data
    stream = StreamConfig(start_window=2, num_windows=3, holdout_window=9, num_workers=num_workers)
    whole, states = train_batches(dataset, index, stream, 20), []
    batches = []
    assert whole.state == (2, 0)
    for batch in whole:
        batches.append(signature(batch))
        states.append(whole.state)
    for done in range(0, len(batches), 3 if num_workers == 0 else 10):
        rest = train_batches(dataset, index, stream, 20, start=states[done])
        assert rest.state == states[done] and len(rest) == len(batches) - done - 1
        assert [signature(batch) for batch in rest] == batches[done + 1 :]
    assert list(train_batches(dataset, index, stream, 20, start=states[-1])) == []


@pytest.mark.parametrize("start", [(1, 0), (5, 0), (2, -1), (2, 99)])
def test_a_start_outside_the_stream_is_refused(data, start):
    with pytest.raises(ValueError, match=r"start=\(.*the checkpoint is of another stream"):
        train_batches(*data, StreamConfig(start_window=2, num_windows=3, holdout_window=9), 20, start=start)


def test_batches_per_window_can_be_capped(data):
    loader = train_batches(*data, STREAM, 8, max_batches_per_window=2)
    states = [loader.state for _ in loader]
    assert states == [(window, number) for window in range(2, 7) for number in (1, 2)] and len(loader) == 10
    assert len(list(eval_batches(*data, STREAM, 4, max_batches=3))) == 3
    assert loader.samples == 5 * 16 and train_batches(*data, STREAM, 8, start=(4, 1), max_batches_per_window=2).samples == 5 * 16


def test_windows_without_anchors_give_no_batch(data):
    dataset, index = data
    loader = BatchLoader(dataset, FixedOrder({0: index.train(0)[:0], 1: index.train(1)[:3], 2: index.train(2)[:0]}), 2)
    assert [(loader.state, batch.real_samples) for batch in loader] == [((1, 1), 2), ((1, 2), 1)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_reach_the_trainer_with_their_message(data, num_workers, monkeypatch):
    dataset, index = data
    order = FixedOrder({2: index.train(2), 3: index.train(3), 4: index.train(4)})

    def fail_in_window_3(window):
        if window == 3:
            raise ValueError("disk of window 3 is gone")
        return order.by_window[window]

    order.anchors = fail_in_window_3
    loader, seen = BatchLoader(dataset, order, 8, num_workers=num_workers), []
    with pytest.raises(ValueError, match="disk of window 3 is gone"):
        for _ in loader:
            seen.append(loader.state[0])
    assert set(seen) == {2} and len(seen) == loader.batches[2]
    if num_workers:
        loader._loader._iterator._shutdown_workers()  # the traceback keeps it alive: collected later it would wait 5 s for each worker


def test_user_split_keeps_train_and_eval_users_apart(data):
    stream = StreamConfig(
        start_window=0, num_windows=-1, holdout_window=12, holdout_num_windows=5, train_split_percentage=0.5, split_salt=3
    )
    users = [
        set(torch.cat([batch.contextual_ids[0] for batch in loader(*data, stream, 16)]).tolist())
        for loader in (train_batches, eval_batches)
    ]
    assert users[0] and users[1] and not users[0] & users[1]


def test_plans(data):
    index = data[1]
    last = index.num_windows - 1
    plans = {
        (0, 3, 5, 2): (range(0, 3), range(5, 7)),
        (2, 3, -1, 2): (range(2, 5), range(5, 7)),
        (2, -1, 7, 1): (range(2, 7), range(7, 8)),
        (1, -1, -1, 2): (range(1, last - 1), range(last - 1, last + 1)),
    }
    for settings, wanted in plans.items():
        plan = StreamConfig("", *settings).resolve(index)
        assert (plan.train, plan.holdout) == wanted


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, r"StreamConfig.start_window=0, num_windows=299: windows \[0, 299\), the data has windows 0 to 19 .*; choose among these"),
        ({"start_window": 20, "num_windows": 1}, r"windows \[20, 21\), the data has windows 0 to 19"),
        ({"num_windows": 5}, r"holdout_window=299, holdout_num_windows=1: windows \[299, 300\), the data has windows 0 to 19"),
        ({"num_windows": 5, "holdout_window": 4}, r"holdout_window=4.*starts before the trained windows \[0, 5\) end; choose 5 or later"),
        ({"num_windows": 5, "start_window": 5, "holdout_window": 0}, r"starts before the trained windows \[5, 10\) end"),
        ({"num_windows": 5, "holdout_window": 19, "holdout_num_windows": 2}, r"windows \[19, 21\)"),
        ({"num_windows": -1, "holdout_window": 0}, r"num_windows=-1: windows \[0, 0\)"),
        ({"num_windows": -1, "holdout_window": -1, "holdout_num_windows": 20}, r"num_windows=-1: windows \[0, 0\)"),
        ({"num_windows": 5, "holdout_window": 7, "train_split_percentage": 0.001}, "no anchor to train on"),
        ({"num_windows": 5, "holdout_window": 7, "train_split_percentage": 0.9999}, "no anchor to evaluate on"),
    ],
)
def test_streams_that_do_not_fit_are_refused(data, settings, message):
    with pytest.raises(ValueError, match=message):
        train_batches(*data, StreamConfig(**settings), 4)
    with pytest.raises(ValueError, match=message):
        eval_batches(*data, StreamConfig(**settings), 4)


def test_an_empty_holdout_window_is_refused(golden):
    stream = StreamConfig(num_windows=3, holdout_window=5)  # the golden data has no anchor in window 5
    with pytest.raises(ValueError, match="holdout_window=5, .*no anchor to evaluate on"):
        eval_batches(golden.dataset, golden.index, stream, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"start_window": -1},
        {"num_windows": 0},
        {"num_windows": -2},
        {"holdout_num_windows": 0},
        {"train_split_percentage": 0.0},
        {"train_split_percentage": 1.1},
        {"shuffle_fraction": -0.1},
        {"shuffle_fraction": 2.0},
        {"shuffle_seed": -1},
        {"num_workers": -1},
        {"prefetch_factor": 0},
        {"num_workers": "4"},
    ],
)
def test_bad_settings_are_refused(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"StreamConfig.{name}={value!r}: must be"):
        StreamConfig(**settings)


def test_bad_sizes_are_refused(data):
    for arguments, message in (
        ((0, 0, 1), "batch_size=0"),
        ((4, 2, 2), "rank=2: must be in"),
        ((4, 0, 1, None, -1), "max_batches_per_window=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            train_batches(*data, STREAM, *arguments)


def test_index_and_dataset_must_agree(data, golden):
    dataset, index = data
    with pytest.raises(ValueError, match="YambdaDataset.min_history=3, IndexConfig.min_history=0"):
        train_batches(dataset, AnchorIndex.open(dataset.store, IndexConfig(0)), STREAM, 4)
    with pytest.raises(ValueError, match="index and dataset must be of one store"):
        train_batches(YambdaDataset(golden.store, HistoryConfig(), 3), index, STREAM, 4)
