"""The checks that all metrics of binary predictions share."""

import numpy as np

from data.checks import require


def counted_samples(predictions, labels, weights=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat predictions (their own dtype), labels (bool) and weights (float64) of the samples whose weight is not 0.

    Raises ValueError for shapes that differ, labels other than 0 and 1, negative or non-finite weights, non-finite predictions. A sample
    of weight 0 is padding: its prediction and label are not looked at.
    """
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    weights = np.ones(predictions.shape) if weights is None else np.asarray(weights, dtype=np.float64)
    for name, array in (("labels", labels), ("weights", weights)):
        require(
            array.shape == predictions.shape, f"{name} have shape {array.shape}, predictions {predictions.shape}: they must be of one shape"
        )
    predictions, labels, weights = predictions.ravel(), labels.ravel(), weights.ravel()
    require(bool(np.isfinite(weights).all() and (weights >= 0).all()), "weights must be finite and not negative")
    if not weights.all():
        counted = weights > 0
        predictions, labels, weights = predictions[counted], labels[counted], weights[counted]
    finite = np.isfinite(predictions)
    if not finite.all():
        first = int(np.argmin(finite))
        raise ValueError(f"{int((~finite).sum())} of {finite.size} predictions are not finite, the first {predictions[first]} at {first}")
    positive = labels == 1
    require(bool((positive | (labels == 0)).all()), "labels must be 0 or 1")
    return predictions, positive, weights
