"""Random batches for tests, made sample by sample, so that a test can regroup, pad or repeat samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dlrm_hstu.batch import Batch
from dlrm_hstu.config import ModelConfig


@dataclass(frozen=True)
class Sample:
    """history: int64 [L, 5], rows (item, artist, album, action bits, time), oldest first. candidates: int64 [n, 5], same columns.
    contextual: int64 [C]. index: the sample's place in its window. weight: 1, or 0 for padding.
    """

    history: np.ndarray
    candidates: np.ndarray
    contextual: np.ndarray
    index: int
    weight: float = 1.0


def small_config(**changes) -> ModelConfig:
    """A model of a few thousand parameters, without dropout; every width is 32 or less."""
    rows = {"item_id": 60, "artist_id": 20, "album_id": 30} | {name: 40 for name in ModelConfig().contextual_features}
    settings = dict(
        table_dim=16,
        embedding_dim=32,
        num_heads=2,
        attention_dim=16,
        hidden_dim=16,
        num_layers=2,
        preprocessor_hidden_dim=24,
        item_hidden_dim=32,
        head_hidden_dim=32,
        max_seq_len=128,
        input_dropout=0.0,
        layer_dropout=0.0,
        position_buckets=160,
        time_buckets=64,
        table_rows=rows,
    )
    return ModelConfig(**(settings | changes))


def random_samples(config: ModelConfig, lengths: Sequence[int], seed: int = 0, *, num_candidates: int | Sequence[int] = 1) -> list[Sample]:
    """One sample for each history length. Neighbours of a pair share a user, so their histories are subsets of one event stream."""
    rng = np.random.default_rng(seed)
    counts = [num_candidates] * len(lengths) if isinstance(num_candidates, int) else list(num_candidates)
    artist_of = rng.integers(config.table_rows["artist_id"], size=config.table_rows["item_id"])
    album_of = rng.integers(config.table_rows["album_id"], size=config.table_rows["item_id"])

    def events(items: np.ndarray, times: np.ndarray) -> np.ndarray:
        return np.stack([items, artist_of[items], album_of[items], rng.integers(8, size=len(items)), times], axis=1)

    samples = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if index % 2 == 0:
            size = max(lengths[index : index + 2]) + 4
            times = np.sort(rng.choice(5 * 86400, size=size, replace=False))
            stream = events(rng.integers(config.table_rows["item_id"], size=size), times)
        chosen = np.sort(rng.choice(len(stream), size=length, replace=False))
        query_times = np.full(count, 5 * 86400 + rng.integers(3600))
        samples.append(
            Sample(
                history=stream[chosen],
                candidates=events(rng.integers(config.table_rows["item_id"], size=count), query_times),
                contextual=np.array([rng.integers(config.table_rows[name]) for name in config.contextual_features], dtype=np.int64),
                index=index,
            )
        )
    return samples


def make_batch(samples: Sequence[Sample], *, merge: bool = True, global_real_samples: int | None = None, world_size: int = 1) -> Batch:
    """The samples as one rank's Batch. merge=False lists every token as an event and an item of its own (E = T, I = T + S)."""
    history = np.concatenate([sample.history for sample in samples])
    candidates = np.concatenate([sample.candidates for sample in samples])
    triples, item = _distinct(np.concatenate([history, candidates])[:, :3], merge)
    events, token_event = _distinct(np.column_stack([item[: len(history)], history[:, 3:]]), merge)
    lengths, counts = [len(sample.history) for sample in samples], [len(sample.candidates) for sample in samples]
    real = sum(sample.weight > 0 for sample in samples)

    def int32(values) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(torch.int32)

    return Batch(
        item_ids=int32(triples[:, 0]),
        artist_ids=int32(triples[:, 1]),
        album_ids=int32(triples[:, 2]),
        event_item=int32(events[:, 0]),
        event_action=torch.as_tensor(events[:, 1]).to(torch.uint8),
        event_time=int32(events[:, 2]),
        token_event=int32(token_event),
        history_lengths=int32(lengths),
        candidate_item=int32(item[len(history) :]),
        candidate_time=int32(candidates[:, 4]),
        candidate_action=torch.as_tensor(candidates[:, 3]).to(torch.uint8),
        num_candidates=int32(counts),
        contextual_ids=int32(np.stack([sample.contextual for sample in samples], axis=1)),
        sample_index=int32([sample.index for sample in samples]),
        weight=torch.tensor([sample.weight for sample in samples], dtype=torch.float32),
        max_history_length=max(lengths),
        max_num_candidates=max(counts),
        real_samples=real,
        global_real_samples=real if global_real_samples is None else global_real_samples,
        world_size=world_size,
    )


def random_batch(
    config: ModelConfig, lengths: Sequence[int], seed: int = 0, *, num_candidates: int | Sequence[int] = 1, merge: bool = True
) -> Batch:
    """A Batch of `random_samples`."""
    return make_batch(random_samples(config, lengths, seed, num_candidates=num_candidates), merge=merge)


def relative_error(actual, expected) -> float:
    """Largest absolute difference by largest absolute expected value. Raises AssertionError on a wrong shape or non-finite values."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(actual).all() and np.isfinite(expected).all(), "values that are not finite"
    if expected.size == 0:
        return 0.0
    difference, scale = np.abs(actual - expected).max(), np.abs(expected).max()
    return float(difference / scale) if scale > 0 else float(difference)


def _distinct(rows: np.ndarray, merge: bool) -> tuple[np.ndarray, np.ndarray]:
    if not merge:
        return rows, np.arange(len(rows))
    if len(rows) == 0:
        return rows, np.zeros(0, dtype=np.int64)
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    return distinct, inverse.reshape(-1)
