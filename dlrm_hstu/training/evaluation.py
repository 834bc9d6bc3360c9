"""Evaluation on the fixed future holdout: every sample of it, once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from dlrm_hstu.batch import Batch
from dlrm_hstu.metrics import auc, normalized_entropy
from dlrm_hstu.parallel.process_group import Ranks, gather_rows


@dataclass(frozen=True)
class EvalResult:
    """auc: exact, ties half; NaN when one class is absent. normalized_entropy: likewise. log_loss: mean binary cross-entropy, nats.
    samples: scored, without padding.
    """

    auc: float
    normalized_entropy: float
    log_loss: float
    samples: int

    def reaches(self, target: float) -> bool:
        """Whether the target is met; never by an undefined AUC."""
        return self.auc >= target


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], ranks: Ranks) -> EvalResult:
    """Score `batches` (this rank's share; all ranks need the same number of samples, padding included) and compare with the labels."""
    was_training = model.training
    model.eval()
    scored = []
    for batch in batches:
        output = model(batch.to(ranks.device, non_blocking=True))
        scored.append(torch.stack([output.predictions, output.labels, output.weights], dim=1))
    model.train(was_training)
    if not scored:
        raise ValueError("the holdout has no samples; choose another StreamConfig.holdout_window")
    scored = gather_rows(torch.cat(scored), ranks.world_size).cpu()
    predictions, labels, weights = scored[scored[:, 2] > 0].unbind(dim=1)
    area = auc(predictions, labels)  # first: it names predictions that are not finite
    log_loss = nn.functional.binary_cross_entropy(predictions.double(), labels.double()).item()
    return EvalResult(area, normalized_entropy(predictions, labels), log_loss, len(labels))
