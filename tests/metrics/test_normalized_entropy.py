import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from dlrm_hstu.metrics import normalized_entropy


def sample(n=1000):
    generator = np.random.default_rng(0)
    labels = (generator.random(n) < 0.3).astype(np.float32)
    return generator.random(n).astype(np.float32), labels, generator.random(n) * 3


@pytest.mark.parametrize("weighted", [False, True])
def test_is_the_ratio_of_two_log_losses(weighted):
    predictions, labels, weights = sample()
    weights = weights if weighted else np.ones(len(labels))
    predictions64 = predictions.astype(np.float64)
    mean = np.full(len(labels), np.average(labels, weights=weights))
    expected = log_loss(labels, predictions64, sample_weight=weights) / log_loss(labels, mean, sample_weight=weights)
    assert normalized_entropy(predictions, labels, weights if weighted else None) == pytest.approx(expected, rel=1e-12)


def test_the_mean_label_scores_one_and_better_scores_less():
    labels = [1, 0, 0, 0]
    assert normalized_entropy([0.25] * 4, labels) == pytest.approx(1.0, rel=1e-14)
    assert normalized_entropy([0.9, 0.1, 0.1, 0.1], labels) < 0.5


def test_certain_predictions_are_clamped():
    # Two certain errors of four: 2 * -ln(1e-12) over 4 ln 2, and two hits that cost nothing.
    value = normalized_entropy(np.array([1.0, 0.0, 1.0, 0.0]), [1, 1, 0, 0])
    assert value == pytest.approx(2 * -math.log(1e-12) / (4 * math.log(2)), rel=1e-4)
    assert normalized_entropy(np.array([1.0, 0.0], np.float32), [1, 0]) == pytest.approx(0.0, abs=1e-11)


def test_clamping_leaves_the_caller_s_array_alone():
    predictions = np.array([0.0, 1.0])
    normalized_entropy(predictions, [0, 1])
    assert predictions.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("arguments", [([0.5, 0.5], [1, 1]), ([0.5, 0.5], [0, 0]), ([], []), ([0.5, 0.5], [0, 1], [0.0, 1.0])])
def test_one_class_is_undefined(arguments):
    assert math.isnan(normalized_entropy(*arguments))


def test_padding_is_not_looked_at():
    predictions, labels, _ = sample(10)
    weights = np.array([1.0] * 8 + [0.0] * 2)
    assert normalized_entropy(predictions, labels, weights) == normalized_entropy(predictions[:8], labels[:8])


def test_takes_tensors():
    arrays = sample(50)
    assert normalized_entropy(*map(torch.from_numpy, arrays)) == normalized_entropy(*arrays)


@pytest.mark.parametrize("bad, message", [(1.5, "not logits"), (-0.1, "not logits"), (np.nan, "not finite")])
def test_logits_and_non_finite_predictions_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        normalized_entropy([0.5, bad], [0, 1])
