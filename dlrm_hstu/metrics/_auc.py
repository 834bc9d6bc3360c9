"""Area under the ROC curve, exact."""

import numpy as np

from dlrm_hstu.metrics._inputs import counted_samples


def auc(predictions, labels, weights=None) -> float:
    """Probability that a positive sample is ranked above a negative one, ties counting one half (Mann-Whitney).

    predictions: fp32 or fp64 scores, any shape; arrays or CPU tensors. labels: 0 or 1, same shape. weights: same shape, not negative;
    None means 1 each. Equal weights are counted in integers, others summed in fp64.
    Returns NaN where it is undefined: no sample of weight > 0 in one of the classes.
    Raises ValueError for shapes that differ, other labels, and predictions or weights that are not finite.
    """
    predictions, positive, weights = counted_samples(predictions, labels, weights)
    if positive.all() or not positive.any():
        return float("nan")
    if (weights == weights[0]).all():
        return _unweighted(np.sort(predictions[positive]), np.sort(predictions[~positive]))
    return _weighted(predictions, positive, weights)


def _unweighted(positives: np.ndarray, negatives: np.ndarray) -> float:
    """The ratio of two integers; both arrays are sorted, which keeps the binary searches in cache."""
    below = int(np.searchsorted(negatives, positives, side="left").sum(dtype=np.int64))
    not_above = int(np.searchsorted(negatives, positives, side="right").sum(dtype=np.int64))
    return (below + not_above) / (2 * len(positives) * len(negatives))


def _weighted(predictions: np.ndarray, positive: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(predictions)
    predictions, positive, weights = predictions[order], positive[order], weights[order]
    group_starts = np.flatnonzero(np.concatenate(([True], predictions[1:] != predictions[:-1])))
    positive_weight = np.add.reduceat(np.where(positive, weights, 0.0), group_starts)
    negative_weight = np.add.reduceat(np.where(positive, 0.0, weights), group_starts)
    half_below = np.cumsum(negative_weight) - negative_weight / 2  # of each group: negatives below it, and half of its own
    return float(np.dot(positive_weight, half_below) / (positive_weight.sum() * negative_weight.sum()))
