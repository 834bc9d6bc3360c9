"""Anchors by window, found once and offline: `python -m data.index DIR --min_history N` adds an index to a store.

An anchor is a listen with at least min_history earlier events of its user, of any type. Window k holds the anchors with a time in
[t_min + k W, t_min + (k + 1) W), W = window_seconds, where t_min is the first anchor's time.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gin
import numpy as np

from data.arrays import lengths_to_offsets, open_arrays, read_manifest, staged_folder, write_manifest
from data.checks import check_fields, require
from data.cli import Parser, run_command
from data.schema import LISTEN, event_type_of
from data.store import EventStore

KIND = "anchor index"
CHUNK_EVENTS = 1 << 20


@gin.configurable
@dataclass(frozen=True)
class IndexConfig:
    """min_history: earlier events an anchor needs. window_seconds: length of a window."""

    min_history: int = 4086
    window_seconds: int = 86400

    def __post_init__(self):
        check_fields(self)
        require(self.min_history >= 0, f"IndexConfig.min_history={self.min_history}: must not be negative")
        require(self.window_seconds > 0, f"IndexConfig.window_seconds={self.window_seconds}: must be positive")


@dataclass(frozen=True)
class UserSplit:
    """Which users are for evaluation only: those whose hash is at least `train_percentage` (a share; 1 means none)."""

    train_percentage: float = 1.0
    salt: int = 0

    def for_eval(self, uids: np.ndarray) -> np.ndarray:
        """bool [n]."""
        return user_hash(uids, self.salt) >= self.train_percentage


def user_hash(uids: np.ndarray, salt: int) -> np.ndarray:
    """A number in [0, 1) for each uid, float64: SplitMix64's finalizer of uid + salt, upper 53 bits."""
    z = np.asarray(uids).astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 + salt) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def shuffled(anchors: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The anchors of a window in training order: mixed within consecutive segments of a share `fraction` of the window, 0 not at all."""
    n = len(anchors)
    if fraction <= 0 or n <= 1:
        return anchors
    rng = np.random.default_rng(seed)
    if fraction >= 1:
        return anchors[rng.permutation(n)]
    segment = np.arange(n) // max(1, round(fraction * n))
    return anchors[np.lexsort((rng.random(n), segment))]


@dataclass(frozen=True, eq=False)
class AnchorIndex:
    """Flat positions of anchors, grouped by window, user-major inside a window.

    positions: int64 [A], memory-mapped. window_offsets: int64 [num_windows + 1]. t_min, t_max: times of the first and last anchor.
    """

    store: EventStore
    config: IndexConfig
    positions: np.ndarray
    window_offsets: np.ndarray
    t_min: int
    t_max: int

    @classmethod
    def open(cls, store: EventStore, config: IndexConfig) -> "AnchorIndex":
        """Map the store's index for these settings; where there is none, build it and put it into the store's folder.

        Raises ValueError where the index is damaged or of another store, or cannot be written.
        """
        folder = cls.folder(store, config)
        if not folder.exists():
            try:
                with staged_folder(folder, replace=False) as stage:
                    _build(store, config, stage)
            except OSError as error:
                command = f"python -m data.index {store.path} --min_history {config.min_history} --window_seconds {config.window_seconds}"
                raise ValueError(
                    f"{folder}: cannot write the index ({error.strerror}); run `{command}` where the folder is writable"
                ) from error
        manifest = read_manifest(folder, KIND)
        require(manifest["store"] == store.fingerprint, f"{folder}: made from another store; delete it, it is then built again")
        arrays = open_arrays(folder, manifest)
        return cls(store, config, arrays["positions"], np.asarray(arrays["window_offsets"]), manifest["t_min"], manifest["t_max"])

    @staticmethod
    def folder(store: EventStore, config: IndexConfig) -> Path:
        """Where the store's index for these settings is, or will be."""
        return store.path / "index" / f"min_history{config.min_history}_window{config.window_seconds}"

    def __reduce__(self):
        return AnchorIndex.open, (self.store, self.config)

    @property
    def num_anchors(self) -> int:
        return len(self.positions)

    @property
    def num_windows(self) -> int:
        return len(self.window_offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """Anchors in each window, int64 [num_windows]."""
        return np.diff(self.window_offsets)

    def train(self, window: int, split: UserSplit | None = None) -> np.ndarray:
        """Flat positions, int64, of a window's anchors; with `split`, of its training users only."""
        return self._select(window, 1, split, for_eval=False)

    def holdout(self, window: int | None = None, num_windows: int = 1, split: UserSplit | None = None) -> np.ndarray:
        """The same for windows [window, window + num_windows), the last ones if `window` is None; with `split`, of its eval users only."""
        first = self.num_windows - num_windows if window is None else window
        return self._select(first, num_windows, split, for_eval=True)

    def train_samples(self, windows: range, split: UserSplit | None = None) -> int:
        """Anchors of all of `windows` that are trained on."""
        if _splits(split):
            return sum(len(self.train(window, split)) for window in windows)
        self._check(windows.start, len(windows))
        return int(self.window_offsets[windows.stop] - self.window_offsets[windows.start])

    def eval_samples(self, window: int | None = None, num_windows: int = 1, split: UserSplit | None = None) -> int:
        """Anchors of the holdout."""
        return len(self.holdout(window, num_windows, split))

    def _select(self, first: int, count: int, split: UserSplit | None, for_eval: bool) -> np.ndarray:
        self._check(first, count)
        positions = self.positions[self.window_offsets[first] : self.window_offsets[first + count]]
        if not _splits(split):
            return positions
        return positions[split.for_eval(self.store.uids[self.store.user_of(positions)]) == for_eval]

    def _check(self, first: int, count: int) -> None:
        valid = 0 <= first and 0 <= count and first + count <= self.num_windows
        require(valid, f"windows [{first}, {first + count}): {self.describe()}; choose among these")

    def describe(self) -> str:
        """Which windows there are, for messages."""
        settings = f"min_history {self.config.min_history}, window_seconds {self.config.window_seconds}"
        if self.num_windows == 0:
            longest = int(np.diff(self.store.user_offsets).max())
            return f"there is no anchor with {settings}, the longest history being {longest} events"
        return f"the data has windows 0 to {self.num_windows - 1} ({settings})"


def _splits(split: UserSplit | None) -> bool:
    return split is not None and split.train_percentage < 1


def anchor_chunks(store: EventStore, min_history: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """First user, user after the last one, and the flat positions, int64 ascending, of their anchors: over all users, some at a time."""
    first = 0
    while first < store.num_users:
        reach = np.searchsorted(store.user_offsets, store.user_offsets[first] + CHUNK_EVENTS, side="right") - 1
        after = max(first + 1, int(reach))
        begin, end = store.user_offsets[first], store.user_offsets[after]
        positions = np.flatnonzero(event_type_of(store.code[begin:end]) == LISTEN) + begin
        earlier = positions - store.user_offsets[store.user_of(positions)]
        yield first, after, positions[earlier >= min_history]
        first = after


def _build(store: EventStore, config: IndexConfig, folder: Path) -> None:
    """Three passes over the codes: first and last time, counts by window, places."""
    t_min, t_max, total = 2**62, -1, 0
    for _, _, positions in anchor_chunks(store, config.min_history):
        if len(positions):
            time = store.time[positions]
            t_min, t_max, total = min(t_min, int(time.min())), max(t_max, int(time.max())), total + len(positions)
    if total == 0:
        t_min, t_max = 0, -1
    num_windows = (t_max - t_min) // config.window_seconds + 1

    def window_of(positions: np.ndarray) -> np.ndarray:
        return (store.time[positions].astype(np.int64) - t_min) // config.window_seconds

    counts = np.zeros(num_windows, dtype=np.int64)
    for _, _, positions in anchor_chunks(store, config.min_history):
        counts += np.bincount(window_of(positions), minlength=num_windows) if len(positions) else 0
    offsets = lengths_to_offsets(counts)
    placed = np.lib.format.open_memmap(folder / "positions.npy", "w+", np.int64, (total,)) if total else np.zeros(0, dtype=np.int64)
    cursor = offsets[:-1].copy()
    for _, _, positions in anchor_chunks(store, config.min_history):
        window = window_of(positions)
        order = np.argsort(window, kind="stable")
        found = np.bincount(window, minlength=num_windows)
        within = np.arange(len(order)) - np.repeat(lengths_to_offsets(found)[:-1], found)
        placed[np.repeat(cursor, found) + within] = positions[order]
        cursor += found
    if total:
        placed.flush()
    else:
        np.save(folder / "positions.npy", placed)
    np.save(folder / "window_offsets.npy", offsets)
    settings = {"min_history": config.min_history, "window_seconds": config.window_seconds}
    write_manifest(folder, KIND, {"store": store.fingerprint, "settings": settings, "t_min": t_min, "t_max": t_max})


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status: 0, or 2 after one line about what to fix."""
    parser = Parser(prog="python -m data.index", description="Add the anchor index for some settings to an event store.")
    parser.add_argument("store", type=Path, help="folder of the store")
    parser.add_argument("--min_history", type=int, default=4086, help="earlier events an anchor needs")
    parser.add_argument("--window_seconds", type=int, default=86400, help="length of a window")
    options = parser.parse_args(arguments)

    def command() -> None:
        config = IndexConfig(min_history=options.min_history, window_seconds=options.window_seconds)
        index = AnchorIndex.open(EventStore.open(options.store), config)
        print(f"{options.store}: {index.num_anchors:,} anchors in {index.num_windows} windows")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
