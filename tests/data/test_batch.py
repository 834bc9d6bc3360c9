from dataclasses import replace

import numpy as np
import pytest
import torch

from data.features import CONTEXTUAL_FEATURES
from data.history import HistoryConfig
from data.index import AnchorIndex, IndexConfig
from data.loader import YambdaDataset, check_batch


def decode(batch) -> list[dict[str, np.ndarray]]:
    """A batch's samples under the benchmark's feature names."""
    triples = [ids.numpy().astype(np.int64) for ids in (batch.item_ids, batch.artist_ids, batch.album_ids)]
    ends = np.cumsum(batch.history_lengths.numpy())
    samples = []
    for place, (end, length) in enumerate(zip(ends, batch.history_lengths.numpy(), strict=True)):
        events = batch.token_event.numpy()[end - length : end]
        items, candidate = batch.event_item.numpy()[events], batch.candidate_item.numpy()[place : place + 1]
        query_time = batch.candidate_time.numpy()[place : place + 1]
        sample = {name: batch.contextual_ids.numpy()[row, place : place + 1] for row, name in enumerate(CONTEXTUAL_FEATURES)}
        sample |= dict(zip(("item_id", "artist_id", "album_id"), (ids[items] for ids in triples), strict=True))
        sample |= {"action_weight": batch.event_action.numpy()[events], "action_timestamp": batch.event_time.numpy()[events]}
        sample |= {"dummy_watch_time": np.zeros(length), "dummy_query_time": query_time, "item_query_time": query_time}
        names = ("item_candidate_id", "item_candidate_artist_id", "item_candidate_album_id")
        sample |= dict(zip(names, (ids[candidate] for ids in triples), strict=True))
        sample |= {"item_action_weight": batch.candidate_action.numpy()[place : place + 1], "item_dummy_watchtime": np.ones(1)}
        samples.append(sample)
    return samples


def assert_decodes(dataset, anchors):
    batch = dataset.batch(anchors, np.arange(len(anchors)), len(anchors), len(anchors))
    for anchor, found in zip(anchors, decode(batch), strict=True):
        wanted = dataset.sample_at(int(anchor))
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values, err_msg=f"{anchor} {name}")
    return batch


@pytest.mark.parametrize("strategy", ["interleaved", "last_n"])
def test_golden_batches_equal_their_samples(golden, strategy):
    dataset = YambdaDataset(golden.store, HistoryConfig(length=30, strategy=strategy), 4)
    anchors = np.random.default_rng(0).permutation(golden.index.positions)
    for begin in range(0, len(anchors), 93):
        assert_decodes(dataset, anchors[begin : begin + 93])


@pytest.mark.parametrize("max_history", [None, 7])
def test_cold_starts_and_items_outside_the_maps(random_store, max_history):
    """min_history 0 brings anchors without history; items 100 to 119 have no artist: the last entry's in a history, 0 as a candidate."""
    dataset = YambdaDataset(random_store, HistoryConfig(length=30), 0, max_history=max_history)
    anchors = np.asarray(AnchorIndex.open(random_store, IndexConfig(0)).positions)[::3]
    batch = assert_decodes(dataset, anchors)
    assert (batch.history_lengths == 0).any()
    cold = int(torch.argmin(batch.history_lengths))
    assert batch.candidate_time[cold] == random_store.time[anchors[cold]]
    outside = batch.item_ids[batch.candidate_item] >= 100
    assert outside.any() and (batch.artist_ids[batch.candidate_item][outside] == 0).all()
    history = batch.event_item[batch.item_ids[batch.event_item] >= 100]
    assert len(history) and (batch.artist_ids[history] == 33).all() and (batch.album_ids[history] == 49).all()


def test_everything_is_listed_once_and_host_numbers_fit(random_store):
    dataset = YambdaDataset(random_store, HistoryConfig(length=30), 3)
    anchors = np.asarray(AnchorIndex.open(random_store, IndexConfig(3)).positions)[-200:]
    batch = dataset.batch(anchors, np.arange(200) + 1000, 150, 300)
    triples = torch.stack([batch.item_ids, batch.artist_ids, batch.album_ids], 1)
    assert len(torch.unique(triples, dim=0)) == len(triples)
    assert set(batch.event_item.tolist()) | set(batch.candidate_item.tolist()) == set(range(len(triples)))
    assert batch.max_history_length == batch.history_lengths.max() == 30 and batch.max_num_candidates == 1
    assert (batch.real_samples, batch.global_real_samples) == (150, 300) and batch.weight.tolist() == [1.0] * 150 + [0.0] * 50
    assert batch.sample_index.tolist() == list(range(1000, 1200))
    kinds = {"event_action": torch.uint8, "candidate_action": torch.uint8, "weight": torch.float32}
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == kinds.get(name, torch.int32), name


def test_contextual_features_come_in_the_callers_order(random_store):
    anchors = np.asarray(AnchorIndex.open(random_store, IndexConfig(3)).positions)[:20]
    everything = YambdaDataset(random_store, HistoryConfig(), 3).batch(anchors, np.arange(20), 20, 20).contextual_ids
    for names in (("user_x_hour", "uid"), tuple(reversed(CONTEXTUAL_FEATURES)), ()):
        found = YambdaDataset(random_store, HistoryConfig(), 3, None, names).batch(anchors, np.arange(20), 20, 20).contextual_ids
        assert torch.equal(found, everything[[CONTEXTUAL_FEATURES.index(name) for name in names]]) and found.shape == (len(names), 20)


@pytest.mark.parametrize(
    "field, change, message",
    [
        ("history_lengths", lambda x: x + 1, r"history_lengths: sums to \d+, token_event has \d+ values"),
        (
            "history_lengths",
            lambda x: torch.cat([x[:1] - 100, x[1:2] + 100, x[2:]]),
            r"history_lengths: -\d+; lengths must not be negative",
        ),
        ("token_event", lambda x: x[:-1], "history_lengths: sums to"),
        ("num_candidates", lambda x: x * 2, "num_candidates: sums to 40, candidate_item has 20 values"),
        ("token_event", lambda x: x - 1, "token_event: values -1 to"),
        ("event_item", lambda x: x + 1, r"event_item: values \d+ to \d+ must be in \[0, \d+\), the places of item_ids"),
        ("candidate_item", lambda x: x + 10**6, "candidate_item: values"),
        ("weight", lambda x: x[:-1], "weight: 19 values for 20 samples"),
        ("contextual_ids", lambda x: x[:, :-1], "contextual_ids: 19 values for 20 samples"),
    ],
)
def test_a_malformed_batch_is_named(random_store, field, change, message):
    anchors = np.asarray(AnchorIndex.open(random_store, IndexConfig(3)).positions)[:20]
    batch = YambdaDataset(random_store, HistoryConfig(length=9), 3).batch(anchors, np.arange(20), 20, 20)
    check_batch(batch)
    with pytest.raises(ValueError, match=f"Batch.{message}"):
        check_batch(replace(batch, **{field: change(getattr(batch, field))}))


def test_anchor_numbers_outside_the_data_are_refused(golden):
    for anchor in (-1, 465):
        with pytest.raises(ValueError, match=f"anchor={anchor}: must"):
            golden.dataset.sample(anchor)
