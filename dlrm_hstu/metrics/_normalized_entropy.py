"""Normalized entropy."""

import numpy as np

from data.checks import require
from dlrm_hstu.metrics._inputs import counted_samples

_CLAMP = 1e-12  # keeps the logarithm of a prediction of exactly 0 or 1 finite


def normalized_entropy(predictions, labels, weights=None) -> float:
    """Cross-entropy of the predictions over that of always predicting the mean label; below 1 is better than that constant.

    predictions: probabilities, any shape; arrays or CPU tensors. labels: 0 or 1, same shape. weights: same shape, not negative; None
    means 1 each. With P and N the weight of positives and negatives and m = P / (P + N), in fp64:
    sum(w * ce) / -(P * log(m) + N * log(1 - m)) (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook").
    Returns NaN where it is undefined: no sample of weight > 0 in one of the classes.
    Raises ValueError as `auc` does, and for a prediction outside [0, 1].
    """
    predictions, positive, weights = counted_samples(predictions, labels, weights)
    if positive.all() or not positive.any():
        return float("nan")
    require(bool((predictions >= 0).all() and (predictions <= 1).all()), "predictions must be probabilities in [0, 1], not logits")
    probabilities = np.clip(predictions.astype(np.float64), _CLAMP, 1 - _CLAMP)
    cross_entropy = -np.dot(weights, np.log(np.where(positive, probabilities, 1 - probabilities)))
    positive_weight, negative_weight = weights[positive].sum(), weights[~positive].sum()
    mean = positive_weight / (positive_weight + negative_weight)
    return float(cross_entropy / -(positive_weight * np.log(mean) + negative_weight * np.log1p(-mean)))
