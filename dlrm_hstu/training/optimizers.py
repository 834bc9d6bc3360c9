"""Both optimizers of a run, driven by one schedule."""

import math
from dataclasses import replace

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_hstu.config import OptimizerConfig
from dlrm_hstu.parallel.sharding import unwrap
from dlrm_hstu.training import schedule


def resolve_learning_rates(config: OptimizerConfig, global_batch: int) -> OptimizerConfig:
    """`config` with learning rates of 0 replaced by the benchmark's reference rate for `global_batch` samples a step."""
    reference = schedule.reference_learning_rate(global_batch)
    return replace(config, dense_lr=config.dense_lr or reference, sparse_lr=config.sparse_lr or reference)


_SPARSE_NAMES = {EmbOptimType.EXACT_ROWWISE_ADAGRAD: "RowWiseAdagrad"}  # as the MLPerf rules spell it


class Optimizers:
    """Adam for the dense parameters; the tables' row-wise Adagrad runs inside the backward pass and is only told its rate here."""

    def __init__(self, model: DistributedModelParallel, config: OptimizerConfig):
        self.config = config
        self.dense_parameters = dict(dense_parameters(unwrap(model)))
        self.dense = torch.optim.Adam(
            self.dense_parameters.values(),
            lr=config.dense_lr,
            betas=(config.beta_1, config.beta_2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.sparse = model.fused_optimizer

    def set_learning_rate(self, step: int) -> None:
        """Set the warmed-up rates of `step`, counted from 0, before its forward pass."""
        config = self.config
        for optimizer, base in ((self.dense, config.dense_lr), (self.sparse, config.sparse_lr)):
            rate = schedule.learning_rate(step, base, config.warmup_steps, config.warmup_start_lr)
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.sparse.step()  # hands the rate to the lookup kernels, nothing else

    def sparse_name_and_rate(self) -> tuple[str, float]:
        """Name and rate of the tables' optimizer as its kernels have them. Raises RuntimeError unless all agree."""
        found = {(_SPARSE_NAMES[kernel.optimizer], kernel.get_learning_rate()) for kernel in _lookup_kernels(self.sparse)}
        if len(found) != 1:
            raise RuntimeError(f"the tables' kernels disagree on the optimizer: {found}")
        return found.pop()

    @property
    def learning_rate(self) -> float:
        """The dense rate in force."""
        return self.dense.param_groups[0]["lr"]

    def zero_grad(self) -> None:
        self.dense.zero_grad(set_to_none=True)

    def step(self, step: int) -> Tensor:
        """Clip the dense gradients, update the dense parameters, return the norm before clipping.

        Raises FloatingPointError before the update if a gradient is not finite, and names step and parameter.
        """
        parameters = list(self.dense_parameters.values())
        norm = nn.utils.clip_grad_norm_(parameters, self.config.grad_clip_norm or math.inf)
        if not torch.isfinite(norm):
            bad = [name for name, parameter in self.dense_parameters.items() if not torch.isfinite(parameter.grad).all()]
            raise FloatingPointError(f"step {step}: gradient of {bad[0] if bad else 'all parameters together'} is not finite")
        self.dense.step()
        return norm


def _lookup_kernels(optimizer: torch.optim.Optimizer):
    """The lookup kernels behind TorchRec's nest of optimizers."""
    for _, part in getattr(optimizer, "optimizers", ()):
        yield from _lookup_kernels(part)
    if hasattr(optimizer, "_emb_module"):
        yield optimizer._emb_module


def dense_parameters(model: nn.Module):
    """(name, parameter) of everything that is not an embedding table."""
    for name, parameter in model.named_parameters():
        if not name.startswith("embeddings."):
            yield name, parameter
