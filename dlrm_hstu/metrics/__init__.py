"""Evaluation metrics on the host, exact and independent of batch and rank layout."""

from dlrm_hstu.metrics._auc import auc
from dlrm_hstu.metrics._normalized_entropy import normalized_entropy

__all__ = ["auc", "normalized_entropy"]
