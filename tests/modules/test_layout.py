"""The layout of a jagged batch against loops over its samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrm_hstu.modules.layout import sequence_layout
from tests.batches import make_batch, random_samples, small_config

TENSORS = ("offsets", "sample", "position", "history_end", "num_targets", "age", "candidate_rows", "source")
HISTORIES = [0, 5, 1, 0, 12, 3]


def config_with(num_contextual: int):
    return small_config(contextual_features=small_config().contextual_features[:num_contextual])


def by_loops(samples, batch, num_contextual: int) -> dict[str, list[int]]:
    """Every field, token by token."""
    result = {name: [] for name in TENSORS}
    result["offsets"].append(0)
    token = candidate = 0
    for b, sample in enumerate(samples):
        start, events, targets = len(result["position"]), len(sample.history), len(sample.candidates)
        times = [0] * num_contextual + sample.history[:, 4].tolist() + sample.candidates[:, 4].tolist()
        sources = [b * num_contextual + c for c in range(num_contextual)]
        sources += [len(samples) * num_contextual + int(batch.token_event[token + i]) for i in range(events)]
        first_candidate = len(samples) * num_contextual + len(batch.event_item) + candidate
        sources += [first_candidate + i for i in range(targets)]
        result["source"] += sources
        result["sample"] += [b] * len(times)
        result["position"] += range(len(times))
        result["age"] += [times[-1] - time for time in times]
        result["candidate_rows"] += [start + num_contextual + events + i for i in range(targets)]
        result["history_end"].append(num_contextual + events)
        result["num_targets"].append(targets)
        result["offsets"].append(start + len(times))
        token, candidate = token + events, candidate + targets
    return result


def assert_layout(samples, num_contextual: int, merge: bool = True) -> None:
    batch = make_batch(samples, merge=merge)
    layout = sequence_layout(batch, num_contextual)
    for name, values in by_loops(samples, batch, num_contextual).items():
        tensor = getattr(layout, name)
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == values, name
    most_targets, most_events = (max(len(getattr(sample, part)) for sample in samples) for part in ("candidates", "history"))
    assert layout.max_length == num_contextual + most_events + most_targets


@pytest.mark.parametrize("num_contextual", [0, 1, 8])
@pytest.mark.parametrize("candidates", [1, [1, 3, 2, 5, 1, 4], [2, 0, 1, 1, 0, 3], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("merge", [True, False])
def test_equals_loops(num_contextual, candidates, merge):
    if num_contextual == 0 and candidates != 1:
        candidates = np.maximum(candidates, 1).tolist()  # a sequence has at least one token
    samples = random_samples(config_with(num_contextual), HISTORIES, seed=num_contextual, num_candidates=candidates)
    assert_layout(samples, num_contextual, merge)


@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    num_contextual = int(rng.integers(1, 9))
    config = config_with(num_contextual)
    samples = random_samples(config, rng.integers(0, 15, size=size), seed, num_candidates=rng.integers(0, 4, size=size))
    assert_layout(samples, num_contextual)


@pytest.mark.parametrize("num_contextual", [0, 2])
def test_all_histories_empty(num_contextual):
    assert_layout(random_samples(config_with(num_contextual), [0, 0, 0], num_candidates=[1, 2, 1]), num_contextual)


def test_no_candidates_at_all():
    assert_layout(random_samples(config_with(2), [3, 0, 4], num_candidates=0), 2)


def test_one_sequence_may_be_empty_between_others():
    """No contextual token, no history, no candidate: the neighbours keep their rows and times."""
    assert_layout(random_samples(config_with(0), [3, 4], num_candidates=1)[:1], 0)
    samples = random_samples(config_with(0), [3, 0, 4], num_candidates=[1, 0, 1])
    batch = make_batch(samples)
    layout, without = sequence_layout(batch, 0), sequence_layout(make_batch([samples[0], samples[2]]), 0)
    assert layout.offsets.tolist() == [0, 4, 4, 9] and without.offsets.tolist() == [0, 4, 9]
    for name in ("position", "age", "candidate_rows"):
        assert torch.equal(getattr(layout, name), getattr(without, name))


def test_history_budget_without_contextual_features():
    assert small_config(contextual_features=(), max_seq_len=64).history_budget == 63
    assert small_config(max_seq_len=64).history_budget == 55


def test_max_length_is_the_hosts_number():
    """No device value decides it: it follows the maxima that travel with the batch."""
    batch = make_batch(random_samples(config_with(2), [3, 4]))
    assert sequence_layout(replace(batch, max_history_length=50), 2).max_length == 53
