"""An external sort: events in file order -> users in ascending order, each user's events by time, ties in file order."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAX_BUCKETS = 512  # one open file each
SORT_BYTES = 64  # of memory per event: its record twice, key and order (46), and what sorting needs beside them


def record_dtype(ratio: np.dtype) -> np.dtype:
    """One event on its way to the store."""
    return np.dtype([("uid", "<u4"), ("time", "<u4"), ("item", "<u4"), ("code", "u1"), ("ratio", ratio)])


class UserBuckets:
    """Files that hold the events of consecutive uids, each small enough to sort in memory.

    counts: int64 [largest uid + 1], events by uid. bucket_events: a bucket holds fewer than this and the events of one user.
    """

    def __init__(self, folder: Path, counts: np.ndarray, bucket_events: int, dtype: np.dtype):
        before = np.cumsum(counts, dtype=np.int64) - counts
        self._bucket_of = (before // bucket_events).astype(np.int16)
        self._dtype = dtype
        self._paths = [folder / f"bucket{number}.tmp" for number in range(int(self._bucket_of[-1]) + 1)]
        self._files = [open(path, "wb") for path in self._paths]

    def add(self, events: np.ndarray) -> None:
        """Append events, a record array in file order."""
        bucket = self._bucket_of[events["uid"]]
        order = np.argsort(bucket, kind="stable")
        events, bucket = events[order], bucket[order]
        edges = np.flatnonzero(np.diff(bucket, prepend=-1, append=-1))
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            self._files[bucket[begin]].write(events[begin:end].data)

    def sorted(self) -> Iterator[np.ndarray]:
        """The events of each bucket, in order; deletes its file."""
        for file in self._files:
            file.close()
        for path in self._paths:
            events = np.fromfile(path, dtype=self._dtype)
            path.unlink()
            key = events["uid"].astype(np.uint64) << np.uint64(32) | events["time"]
            events = events[np.argsort(key, kind="stable")]
            del key
            yield events


def count_duplicates(events: np.ndarray) -> int:
    """How many events of a sorted record array are exact copies of another one, not counting the first of each."""
    tied = (events["uid"][1:] == events["uid"][:-1]) & (events["time"][1:] == events["time"][:-1])
    of_a_tie = np.zeros(len(events), dtype=bool)
    of_a_tie[1:] |= tied
    of_a_tie[:-1] |= tied
    candidates = np.sort(events[of_a_tie], order=["uid", "time", "item", "code", "ratio"])
    return int(np.count_nonzero(candidates[1:] == candidates[:-1]))


def count_sessions(events: np.ndarray, gap_s: int) -> int:
    """Sessions in a sorted record array: a new one starts with each user and after a gap of more than `gap_s` seconds."""
    if len(events) == 0:
        return 0
    time = events["time"].astype(np.int64)
    return 1 + int(np.count_nonzero((np.diff(events["uid"]) != 0) | (np.diff(time) > gap_s)))
