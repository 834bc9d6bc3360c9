"""Which of a user's earlier events a sample sees. Three pools: listen+ (half or more played), like, skip; other events are in no history.

"interleaved" takes the newest length // 3 events of each pool and merges them in time order; "last_n" the newest `length` of all pools.
Only the `scan_window` events before the anchor are looked at. "Before" means an earlier flat position, so an event at the anchor's own
second that the file lists first is history.
"""

from dataclasses import dataclass

import gin
import numpy as np

from data.arrays import lengths_to_offsets, ranges
from data.checks import check_fields, require
from data.schema import LIKE_ACTION, LISTEN_PLUS_ACTION, SKIP_ACTION, action_of
from data.store import EventStore

STRATEGIES = ("interleaved", "last_n")


@gin.configurable
@dataclass(frozen=True)
class HistoryConfig:
    """length: budget L of a history in events. strategy: "interleaved" or "last_n". scan_window: events looked at before an anchor."""

    length: int = 4086
    strategy: str = "interleaved"
    scan_window: int = 20000

    def __post_init__(self):
        check_fields(self)
        for name in ("length", "scan_window"):
            require(getattr(self, name) > 0, f"HistoryConfig.{name}={getattr(self, name)}: must be positive")
        require(self.strategy in STRATEGIES, f"HistoryConfig.strategy={self.strategy!r}: must be one of {', '.join(STRATEGIES)}")

    @property
    def pools(self) -> list[tuple[tuple[int, ...], int]]:
        """Actions of each pool, and how many of its newest events are taken."""
        kinds = (LISTEN_PLUS_ACTION, LIKE_ACTION, SKIP_ACTION)
        if self.strategy == "last_n":
            return [(kinds, self.length)]
        return [((kind,), max(1, self.length // 3)) for kind in kinds]


def history_of(store: EventStore, position: int, config: HistoryConfig, max_history: int | None = None) -> np.ndarray:
    """Flat positions, int64 ascending, of one anchor's history; at most the newest `max_history` of them."""
    begin = max(int(store.user_offsets[store.user_of(position)]), position - config.scan_window)
    action = action_of(store.code[begin:position])
    taken = np.concatenate([np.flatnonzero(np.isin(action, kinds))[-count:] for kinds, count in config.pools])
    return np.sort(taken)[-_budget(max_history) :] + begin


@dataclass(frozen=True, eq=False)
class Histories:
    """Histories of B anchors by distinct event.

    events: int64 [E], flat positions, ascending. token_event: int32 [T] into `events`, sample-major, oldest first. lengths: int32 [B].
    """

    events: np.ndarray
    token_event: np.ndarray
    lengths: np.ndarray


def gather(store: EventStore, anchors: np.ndarray, config: HistoryConfig, max_history: int | None = None) -> Histories:
    """`history_of` for flat positions `anchors`, int64 [B]. A user's codes are read once, however many anchors are the user's."""
    scanned = _ScannedEvents(store, anchors, config.scan_window)
    owners, tokens = [], []
    for kinds, count in config.pools:
        pool = np.flatnonzero(_is_one_of(scanned.action, kinds))
        end = np.searchsorted(pool, scanned.end)
        begin = np.maximum(np.searchsorted(pool, scanned.begin), end - count)
        owners.append(np.repeat(np.arange(len(anchors)), end - begin))
        tokens.append(pool[ranges(begin, end)])
    owner, token = np.concatenate(owners), np.concatenate(tokens)
    if len(tokens) > 1:
        span = len(scanned.action) + 1
        owner, token = np.divmod(np.sort(owner * span + token), span)  # sample-major, then by time
    lengths = np.bincount(owner, minlength=len(anchors))
    surplus = np.maximum(lengths - _budget(max_history), 0)
    if surplus.any():
        rank = np.arange(len(token)) - lengths_to_offsets(lengths)[owner]
        token, lengths = token[rank >= surplus[owner]], lengths - surplus
    used = np.zeros(len(scanned.action), dtype=bool)
    used[token] = True
    number = np.cumsum(used, dtype=np.int32) - np.int32(1)
    return Histories(scanned.positions(np.flatnonzero(used)), number[token], lengths.astype(np.int32))


class _ScannedEvents:
    """The events that any anchor of a batch looks at, user by user. Anchor i looks at [begin[i], end[i]) of them."""

    def __init__(self, store: EventStore, anchors: np.ndarray, scan_window: int):
        users, which = np.unique(store.user_of(anchors), return_inverse=True)
        first = np.maximum(store.user_offsets[users[which]], anchors - scan_window)
        self._first = np.full(len(users), np.iinfo(np.int64).max)
        last = np.zeros(len(users), dtype=np.int64)
        np.minimum.at(self._first, which, first)
        np.maximum.at(last, which, anchors)
        self._start = lengths_to_offsets(last - self._first)
        self.action = action_of(np.concatenate([store.code[a:b] for a, b in zip(self._first, last, strict=True)]))
        shift = self._start[which] - self._first[which]
        self.begin, self.end = first + shift, anchors + shift

    def positions(self, places: np.ndarray) -> np.ndarray:
        """Flat positions of places among the scanned events, both ascending."""
        counts = np.diff(np.searchsorted(places, self._start))
        return places + np.repeat(self._first - self._start[:-1], counts)


def _is_one_of(action: np.ndarray, kinds: tuple[int, ...]) -> np.ndarray:
    return (action & np.uint8(sum(kinds))) != 0


def _budget(max_history: int | None) -> int:
    if max_history is None:
        return np.iinfo(np.int64).max
    require(max_history > 0, f"max_history={max_history}: must be positive; raise the model's max_seq_len")
    return max_history
