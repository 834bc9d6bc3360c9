import math
import time

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from dlrm_hstu.metrics import auc


def sample(n, seed=0, ties=False):
    generator = np.random.default_rng(seed)
    labels = generator.random(n) < 0.3
    logits = generator.normal(size=n) + labels
    predictions = (1 / (1 + np.exp(-logits))).astype(np.float32)
    weights = generator.random(n) * 3
    return (np.round(predictions, 1) if ties else predictions), labels.astype(np.float32), weights


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [2, 3, 10, 1000, 20_000])
def test_equals_scikit_learn(n, weighted, ties):
    for seed in range(5):
        predictions, labels, weights = sample(n, seed, ties)
        labels[:2] = 0, 1
        weights = weights if weighted else None
        assert auc(predictions, labels, weights) == pytest.approx(roc_auc_score(labels, predictions, sample_weight=weights), abs=1e-12)


def test_ties_count_one_half():
    assert auc([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1]) == 0.5
    assert auc([0.2, 0.2, 0.9], [0, 1, 1]) == 0.75
    assert auc([0.2, 0.2, 0.9], [0, 1, 1], [1.0, 1.0, 3.0]) == 3.5 / 4


def test_order_of_samples_does_not_matter_to_the_last_bit():
    predictions, labels, _ = sample(5000, ties=True)
    order = np.random.default_rng(1).permutation(5000)
    assert auc(predictions, labels) == auc(predictions[order], labels[order])


def test_separated_and_reversed():
    assert auc([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]) == 1.0
    assert auc([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0]) == 0.0


def test_counts_are_exact_where_fp32_sums_are_not():
    # 18,000,001 has no fp32: a sum in fp32 would stop or round.
    negatives, positives = 20_000_000, 1
    predictions = np.zeros(negatives + positives, np.float32)
    predictions[:18_000_001] = -1
    labels = np.zeros(negatives + positives, bool)
    labels[-1] = True
    assert auc(predictions, labels) == (18_000_001 + 0.5 * 1_999_999) / 20_000_000


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 0, 0]])
def test_one_class_is_undefined_and_reaches_no_target(labels):
    value = auc([0.1, 0.2, 0.3], labels)
    assert math.isnan(value) and not value >= 0.0


def test_no_sample_or_no_weight_is_undefined():
    assert math.isnan(auc([], []))
    assert math.isnan(auc([0.1, 0.9], [0, 1], [0.0, 0.0]))
    assert math.isnan(auc([0.1, 0.9, 0.5], [0, 1, 0], [1.0, 0.0, 1.0]))


def test_padding_is_not_looked_at():
    predictions, labels, _ = sample(100)
    weights = np.ones(100, np.float32)
    weights[60:] = 0
    padded = predictions.copy()
    padded[60:] = np.nan
    assert auc(padded, labels, weights) == auc(predictions[:60], labels[:60])


def test_equal_weights_are_no_weights():
    predictions, labels, _ = sample(1000)
    assert auc(predictions, labels, np.full(1000, 0.1)) == auc(predictions, labels)


def test_takes_tensors_and_any_shape():
    predictions, labels, weights = sample(100)
    tensors = [torch.from_numpy(array.reshape(25, 4)) for array in (predictions, labels, weights)]
    assert auc(*tensors) == auc(predictions, labels, weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0]])
def test_non_finite_predictions_are_refused(bad, weights):
    with pytest.raises(ValueError, match=r"1 of 3 predictions are not finite, the first -?(nan|inf) at 1"):
        auc([0.1, bad, 0.3], [0, 1, 0], weights)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([0.1, 0.2], [0, 1, 0]), r"labels have shape \(3,\), predictions \(2,\)"),
        (([0.1, 0.2], [0, 1], [1.0]), r"weights have shape \(1,\)"),
        (([[0.1], [0.2]], [0, 1]), r"labels have shape \(2,\), predictions \(2, 1\)"),
        (([0.1, 0.2], [0, 2]), "labels must be 0 or 1"),
        (([0.1, 0.2], [0, np.nan]), "labels must be 0 or 1"),
        (([0.1, 0.2], [0, 1], [1.0, -1.0]), "weights"),
        (([0.1, 0.2], [0, 1], [1.0, np.nan]), "weights"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        auc(*arguments)


def test_the_whole_holdout_takes_less_than_a_second():
    predictions, labels, _ = sample(2_058_204)
    elapsed = []
    for _ in range(3):
        start = time.process_time()
        auc(predictions, labels)
        elapsed.append(time.process_time() - start)
    assert min(elapsed) < 1.0
