"""Streams of batches: which anchors, in which order, on which rank.

Order is a function of (window, rank, world size, shuffle seed) alone. Global batch g of a window is its anchors [g G, (g + 1) G) with
G = batch_size * world_size; rank r gets elements r, r + world_size, ... of it. A window's last batch is filled up with samples of weight
0, on every rank alike: nothing is dropped, and all ranks take the same number of steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import gin
import numpy as np
from torch.utils.data import DataLoader, Dataset

from data.checks import check_fields, require
from data.dataset import YambdaDataset, check_batch
from data.index import AnchorIndex, UserSplit, shuffled
from dlrm_hstu.batch import Batch

__all__ = [
    "BatchLoader",
    "HoldoutOrder",
    "StreamConfig",
    "StreamPlan",
    "TrainOrder",
    "YambdaDataset",
    "check_batch",
    "eval_batches",
    "train_batches",
]


@dataclass(frozen=True)
class StreamPlan:
    """Windows to train on, and windows to evaluate on."""

    train: range
    holdout: range


@gin.configurable
@dataclass(frozen=True)
class StreamConfig:
    """What is trained on, what is held out, in which order.

    path: folder of the store. start_window, num_windows: training windows; num_windows -1 means all before the holdout.
    holdout_window, holdout_num_windows: windows of the holdout, after all training windows. A negative holdout_window means right after
        training, start_window + num_windows; with num_windows -1, the last windows of the data.
    train_split_percentage, split_salt: share of users that are trained on, chosen by hash; below 1 only the others are evaluated on.
    shuffle_fraction, shuffle_seed: training order within a window, see data.index.shuffled; 0 keeps it user-major.
    num_workers: loader processes of each rank, 0 loads in the training process. prefetch_factor: batches made ahead by each.
    """

    path: str = ""
    start_window: int = 0
    num_windows: int = 299
    holdout_window: int = 299
    holdout_num_windows: int = 1
    train_split_percentage: float = 1.0
    split_salt: int = 0
    shuffle_fraction: float = 0.0
    shuffle_seed: int = 0
    num_workers: int = 0
    prefetch_factor: int = 2

    def __post_init__(self):
        check_fields(self)
        for name, least in (
            ("start_window", 0),
            ("holdout_num_windows", 1),
            ("shuffle_seed", 0),
            ("num_workers", 0),
            ("prefetch_factor", 1),
        ):
            require(getattr(self, name) >= least, f"StreamConfig.{name}={getattr(self, name)}: must be at least {least}")
        windows = self.num_windows
        require(windows > 0 or windows == -1, f"StreamConfig.num_windows={windows}: must be positive, or -1 for all before the holdout")
        share = self.train_split_percentage
        require(0 < share <= 1, f"StreamConfig.train_split_percentage={share}: must be in (0, 1]")
        require(0 <= self.shuffle_fraction <= 1, f"StreamConfig.shuffle_fraction={self.shuffle_fraction}: must be in [0, 1]")

    @property
    def split(self) -> UserSplit:
        return UserSplit(self.train_split_percentage, self.split_salt)

    def resolve(self, index: AnchorIndex) -> StreamPlan:
        """The windows meant. Raises ValueError where some do not exist, overlap, or hold nothing to train or evaluate on."""
        held = self.holdout_window
        if held < 0:
            after_training = self.start_window + self.num_windows
            held = after_training if self.num_windows > 0 else index.num_windows - self.holdout_num_windows
        end = held if self.num_windows == -1 else self.start_window + self.num_windows
        exist = index.describe()
        train = f"StreamConfig.start_window={self.start_window}, num_windows={self.num_windows}"
        holdout = f"StreamConfig.holdout_window={self.holdout_window}, holdout_num_windows={self.holdout_num_windows}"
        require(self.start_window < end <= index.num_windows, f"{train}: windows [{self.start_window}, {end}), {exist}; choose among these")
        held_end = held + self.holdout_num_windows
        require(held_end <= index.num_windows, f"{holdout}: windows [{held}, {held_end}), {exist}; choose among these")
        require(end <= held, f"{holdout}: starts before the trained windows [{self.start_window}, {end}) end; choose {end} or later")
        plan = StreamPlan(range(self.start_window, end), range(held, held_end))
        trained = any(len(index.train(window, self.split)) for window in plan.train)
        require(trained, f"{train}: no anchor to train on; choose other windows or another split")
        require(
            len(HoldoutOrder(index, self, plan).anchors(held)) > 0,
            f"{holdout}: no anchor to evaluate on; choose other windows or another split",
        )
        return plan


class TrainOrder:
    """The training windows and the order of anchors in each."""

    def __init__(self, index: AnchorIndex, stream: StreamConfig, plan: StreamPlan):
        self.index, self.stream, self.windows = index, stream, list(plan.train)

    def count(self, window: int) -> int:
        """Anchors of a window."""
        return self.index.train_samples(range(window, window + 1), self.stream.split)

    def anchors(self, window: int) -> np.ndarray:
        """Flat positions, int64, in training order."""
        found = self.index.train(window, self.stream.split)
        return shuffled(found, self.stream.shuffle_fraction, self.stream.shuffle_seed + window)


class HoldoutOrder:
    """The holdout: one window, whatever the number of windows it is made of, in user-major order inside each of these."""

    def __init__(self, index: AnchorIndex, stream: StreamConfig, plan: StreamPlan):
        self.index, self.stream, self.plan, self.windows = index, stream, plan, [plan.holdout.start]

    def count(self, window: int) -> int:
        return len(self.anchors(window))

    def anchors(self, window: int) -> np.ndarray:
        return self.index.holdout(window, len(self.plan.holdout), self.stream.split)


class BatchLoader:
    """Iterates Batch over the windows of an order. `iter` starts again at `start`, as often as it is called.

    dataset: makes the batches. order: has `windows`, `count(window)` and `anchors(window)`. batch_size: samples of one rank's batch.
    start: (window, batches of it that are done). max_batches_per_window: 0 means all. Errors of worker processes are raised here.
    """

    def __init__(
        self,
        dataset: YambdaDataset,
        order: TrainOrder | HoldoutOrder,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        start: tuple[int, int] | None = None,
        max_batches_per_window: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 2,
    ):
        require(batch_size > 0, f"batch_size={batch_size}: must be positive")
        require(0 <= rank < world_size, f"rank={rank}: must be in [0, world_size={world_size})")
        require(max_batches_per_window >= 0, f"max_batches_per_window={max_batches_per_window}: must not be negative")
        self._tasks = _Tasks(dataset, order, batch_size, rank, world_size)
        counts, global_batch = {window: order.count(window) for window in order.windows}, batch_size * world_size
        whole = {window: -(-count // global_batch) for window, count in counts.items()}
        self.batches = {window: min(batches, max_batches_per_window or batches) for window, batches in whole.items()}
        # Samples of all windows on all ranks, without padding and whatever `start`.
        self.samples = sum(min(counts[window], batches * global_batch) for window, batches in self.batches.items())
        self._start = self.state = self._check_start(start)
        self._todo = [
            (window, batch) for window in order.windows for batch in range(self.batches[window]) if (window, batch) >= self._start
        ]
        self._loader = self._tasks
        if num_workers > 0:
            settings = {"num_workers": num_workers, "prefetch_factor": prefetch_factor, "persistent_workers": True}
            self._loader = DataLoader(self._tasks, batch_size=None, sampler=self._todo, collate_fn=_as_it_is, **settings)

    def __len__(self) -> int:
        """Batches from `start` to the end."""
        return len(self._todo)

    def __iter__(self) -> Iterator[Batch]:
        """Batches in order. `state` is (window, batches of it already yielded), up to date when a batch is handed out."""
        self.state = self._start
        batches = iter(self._loader) if isinstance(self._loader, DataLoader) else (self._tasks[task] for task in self._todo)
        for (window, number), batch in zip(self._todo, batches, strict=True):
            self.state = (window, number + 1)
            yield batch

    def _check_start(self, start: tuple[int, int] | None) -> tuple[int, int]:
        windows = list(self.batches)
        window, batch = start or (windows[0], 0)
        require(
            window in self.batches, f"start={start}: the windows are {windows[0]} to {windows[-1]}; the checkpoint is of another stream"
        )
        most = self.batches[window]
        require(0 <= batch <= most, f"start={start}: window {window} has {most} batches; the checkpoint is of another stream")
        return (window, batch)


class _Tasks(Dataset):
    """Batches by (window, batch), for any process."""

    def __init__(self, dataset: YambdaDataset, order: TrainOrder | HoldoutOrder, batch_size: int, rank: int, world_size: int):
        self.dataset, self.order, self.batch_size, self.rank, self.world_size = dataset, order, batch_size, rank, world_size
        self._window, self._anchors = None, None

    def __getitem__(self, task: tuple[int, int]) -> Batch:
        window, number = task
        if window != self._window:
            self._window, self._anchors = window, self.order.anchors(window)
        global_batch = self.batch_size * self.world_size
        first, total = number * global_batch, len(self._anchors)
        place = first + self.rank + self.world_size * np.arange(self.batch_size)
        real = int(np.count_nonzero(place < total))
        anchors = np.asarray(self._anchors[np.minimum(place, total - 1)])
        batch = self.dataset.batch(anchors, place, real, min(global_batch, total - first))
        batch = replace(batch, world_size=self.world_size)
        check_batch(batch)
        return batch


def _as_it_is(batch: Batch) -> Batch:
    return batch


def train_batches(
    dataset: YambdaDataset,
    index: AnchorIndex,
    stream: StreamConfig,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    start: tuple[int, int] | None = None,
    max_batches_per_window: int = 0,
    plan: StreamPlan | None = None,
) -> BatchLoader:
    """The training batches of a stream. plan: `stream.resolve(index)`, if it is at hand.

    Raises ValueError where the stream does not fit the index or the index the dataset.
    """
    _check_index(dataset, index)
    order = TrainOrder(index, stream, plan or stream.resolve(index))
    workers = {"num_workers": stream.num_workers, "prefetch_factor": stream.prefetch_factor}
    return BatchLoader(dataset, order, batch_size, rank, world_size, start, max_batches_per_window, **workers)


def eval_batches(
    dataset: YambdaDataset,
    index: AnchorIndex,
    stream: StreamConfig,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_batches: int = 0,
    plan: StreamPlan | None = None,
) -> BatchLoader:
    """The holdout's batches, all of it unless `max_batches` is positive. plan and errors as for `train_batches`."""
    _check_index(dataset, index)
    order = HoldoutOrder(index, stream, plan or stream.resolve(index))
    workers = {"num_workers": stream.num_workers, "prefetch_factor": stream.prefetch_factor}
    return BatchLoader(dataset, order, batch_size, rank, world_size, None, max_batches, **workers)


def _check_index(dataset: YambdaDataset, index: AnchorIndex) -> None:
    ours, theirs = dataset.min_history, index.config.min_history
    require(ours == theirs, f"YambdaDataset.min_history={ours}, IndexConfig.min_history={theirs}: must be equal")
    require(dataset.store.fingerprint == index.store.fingerprint, f"{index.store.path}: index and dataset must be of one store")
