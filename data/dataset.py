"""Samples and batches of a store: one anchor's features by the benchmark's names, or many anchors' as a Batch."""

from collections.abc import Sequence

import numpy as np
import torch

from data.checks import require
from data.features import CONTEXTUAL_FEATURES, DEFAULT_TABLE_ROWS, check_tables, contextual_ids, hour_of_day
from data.history import HistoryConfig, gather, history_of
from data.index import anchor_chunks
from data.schema import LISTEN_PLUS_ACTION, action_of, organic_of
from data.store import EventStore
from dlrm_hstu.batch import Batch


class YambdaDataset:
    """Anchors of a store as samples.

    min_history: which listens are anchors; it numbers them for `sample`. table_rows: rows by table, the benchmark's by default.
    contextual_features: rows of `Batch.contextual_ids`. max_history: tokens of history that fit in the model, None if there is no bound.
    Raises ValueError where an id of the store has no row in its table.
    """

    def __init__(
        self,
        store: EventStore,
        history: HistoryConfig,
        min_history: int,
        table_rows: dict[str, int] | None = None,
        contextual_features: Sequence[str] = CONTEXTUAL_FEATURES,
        max_history: int | None = None,
    ):
        require(min_history >= 0, f"min_history={min_history}: must not be negative")
        require(max_history is None or max_history > 0, f"max_history={max_history}: must be positive; raise the model's max_seq_len")
        self.store, self.history, self.min_history, self.max_history = store, history, min_history, max_history
        self.contextual_features = tuple(contextual_features)
        self.table_rows = dict(DEFAULT_TABLE_ROWS if table_rows is None else table_rows)
        check_tables(store, self.contextual_features, self.table_rows)

    def position_of(self, anchor: int) -> int:
        """The flat position of the anchor of that number: anchors are counted from 0 in ascending flat position. Scans codes up to it."""
        require(anchor >= 0, f"anchor={anchor}: must not be negative")
        before = 0
        for _, _, positions in anchor_chunks(self.store, self.min_history):
            if anchor < before + len(positions):
                return int(positions[anchor - before])
            before += len(positions)
        raise ValueError(f"anchor={anchor}: must be below {before}, the number of anchors with min_history {self.min_history}")

    def sample(self, anchor: int) -> dict[str, np.ndarray]:
        """Features of the anchor of that number (see `position_of`): int64 arrays by name, 15 of the history and 6 of the candidate.

        The 15 are the contextual features (8 by default), six of the events, oldest first, and the query time.
        """
        return self.sample_at(self.position_of(anchor))

    def sample_at(self, position: int) -> dict[str, np.ndarray]:
        """The same for the listen at a flat position."""
        store = self.store
        events = history_of(store, position, self.history, self.max_history)
        item, time = store.item[events].astype(np.int64), store.time[events].astype(np.int64)
        keys = self._candidate_keys(np.array([position]))
        query_time = time[-1:] if len(events) else store.time[[position]].astype(np.int64)
        known = np.minimum(item, store.num_items - 1)
        contextual = contextual_ids(self.contextual_features, keys, self.table_rows)
        return {
            **dict(zip(self.contextual_features, contextual.astype(np.int64), strict=True)),
            "item_id": item,
            "artist_id": store.item_artist[known].astype(np.int64),
            "album_id": store.item_album[known].astype(np.int64),
            "action_weight": action_of(store.code[events]).astype(np.int64),
            "action_timestamp": time,
            "dummy_watch_time": np.zeros_like(time),
            "dummy_query_time": query_time,
            "item_candidate_id": keys["item_id"],
            "item_candidate_artist_id": keys["artist_id"],
            "item_candidate_album_id": keys["album_id"],
            "item_query_time": query_time,
            "item_action_weight": self._label_bits(np.array([position])).astype(np.int64),
            "item_dummy_watchtime": np.ones(1, dtype=np.int64),
        }

    def batch(self, anchors: np.ndarray, sample_index: np.ndarray, real_samples: int, global_real_samples: int) -> Batch:
        """The Batch of B >= 1 anchors, flat positions int64 [B], of which the first `real_samples` have weight 1 and the rest 0."""
        store = self.store
        histories = gather(store, anchors, self.history, self.max_history)
        time = store.time[histories.events].astype(np.int32)
        keys = self._candidate_keys(anchors)
        ends = np.cumsum(histories.lengths, dtype=np.int64)
        query_time = store.time[anchors].astype(np.int32)
        filled = histories.lengths > 0
        query_time[filled] = time[histories.token_event[ends[filled] - 1]]
        item, artist, album, place = self._triples(store.item[histories.events], keys["item_id"])
        num_events = len(histories.events)
        arrays = {
            "item_ids": item,
            "artist_ids": artist,
            "album_ids": album,
            "event_item": place[:num_events].astype(np.int32),
            "event_action": action_of(store.code[histories.events]),
            "event_time": time,
            "token_event": histories.token_event,
            "history_lengths": histories.lengths,
            "candidate_item": place[num_events:].astype(np.int32),
            "candidate_time": query_time,
            "candidate_action": self._label_bits(anchors),
            "num_candidates": np.ones(len(anchors), dtype=np.int32),
            "contextual_ids": contextual_ids(self.contextual_features, keys, self.table_rows),
            "sample_index": sample_index.astype(np.int32),
            "weight": (np.arange(len(anchors)) < real_samples).astype(np.float32),
        }
        return Batch(
            **{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
            max_history_length=int(histories.lengths.max()),
            max_num_candidates=1,
            real_samples=real_samples,
            global_real_samples=global_real_samples,
        )

    def _candidate_keys(self, anchors: np.ndarray) -> dict[str, np.ndarray]:
        store = self.store
        item = store.item[anchors].astype(np.int64)
        inside = item < store.num_items  # an item outside the maps: 0 as a candidate, the last entry in a history, as the benchmark has it
        place = np.where(inside, item, 0)
        return {
            "uid": store.uids[store.user_of(anchors)].astype(np.int64),
            "item_id": item,
            "artist_id": np.where(inside, store.item_artist[place], 0).astype(np.int64),
            "album_id": np.where(inside, store.item_album[place], 0).astype(np.int64),
            "hour_of_day": hour_of_day(store.time[anchors].astype(np.int64)),
            "is_organic": organic_of(store.code[anchors]).astype(np.int64),
        }

    def _label_bits(self, anchors: np.ndarray) -> np.ndarray:
        return action_of(self.store.code[anchors]) & np.uint8(LISTEN_PLUS_ACTION)

    def _triples(self, events: np.ndarray, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Distinct item, artist and album ids, int32 [I], and each event's and then each candidate's place among them."""
        store = self.store
        outside = candidates >= store.num_items
        keys = np.concatenate([events.astype(np.int64) * 2, candidates * 2 + outside])
        distinct, place = np.unique(keys, return_inverse=True)
        item, as_candidate = distinct >> 1, (distinct & 1).astype(bool)
        known = np.minimum(item, store.num_items - 1)
        artist, album = (np.where(as_candidate, 0, table[known]).astype(np.int32) for table in (store.item_artist, store.item_album))
        return item.astype(np.int32), artist, album, place


def check_batch(batch: Batch) -> None:
    """Raise ValueError, naming the field, unless lengths fit the values they count and every index points at something."""
    counted = {"history_lengths": "token_event", "num_candidates": "candidate_item"}
    for lengths, values in counted.items():
        length = getattr(batch, lengths)
        least = int(length.min()) if len(length) else 0
        require(least >= 0, f"Batch.{lengths}: {least}; lengths must not be negative")
        total, found = int(length.sum(dtype=torch.int64)), len(getattr(batch, values))
        require(total == found, f"Batch.{lengths}: sums to {total}, {values} has {found} values; they must agree")
    for index, target in {"token_event": "event_item", "event_item": "item_ids", "candidate_item": "item_ids"}.items():
        places, size = getattr(batch, index), len(getattr(batch, target))
        if len(places):
            low, high = int(places.min()), int(places.max())
            require(0 <= low and high < size, f"Batch.{index}: values {low} to {high} must be in [0, {size}), the places of {target}")
    for name in ("num_candidates", "contextual_ids", "sample_index", "weight"):
        found = getattr(batch, name).shape[-1]
        require(found == batch.batch_size, f"Batch.{name}: {found} values for {batch.batch_size} samples; they must agree")
