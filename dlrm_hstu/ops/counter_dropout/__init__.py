"""Dropout whose mask is a function of where an element is, not of when it was drawn.

The keep bit of an element depends on (seed, step, site) and on its sample, position and column alone: any row's mask can be made by
itself, on any device, at any world size, after any resume.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_hstu.ops.counter_dropout.reference import mix64, random_bits, row_keys


@dataclass(frozen=True)
class DropoutKey:
    """seed: of the run. step: global step. site: which dropout of the model, unique within it."""

    seed: int
    step: int
    site: int

    def mixed(self) -> int:
        """The key as one 64-bit host number."""
        return mix64(mix64(mix64(self.seed) + self.step) + self.site)


def dropout(x: Tensor, p: float, key: DropoutKey | None, rows: tuple[Tensor, Tensor]) -> Tensor:
    """x / (1 - p) where kept, 0 elsewhere; x itself when p is 0 or key is None (evaluation).

    x: [T, D]. p: drop probability in [0, 1). rows: (sample, position), each integer [T]: what a row is keyed by.
    """
    if p == 0 or key is None:
        return x
    if x.is_cuda:
        return _KernelDropout.apply(x, p, key, rows)
    bits = random_bits(row_keys(key.mixed(), *rows), x.shape[1])
    keep = bits >= round(p * 2**32) - 2**31  # bits are uniform over the signed 32-bit range
    return torch.where(keep, x / (1 - p), 0)


class _KernelDropout(torch.autograd.Function):
    """The same mask from a kernel; the backward draws it again."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float, key: DropoutKey, rows: tuple[Tensor, Tensor]) -> Tensor:
        from dlrm_hstu.ops.counter_dropout.triton import dropout_forward  # brings triton

        ctx.settings = (p, key, rows)
        return dropout_forward(x.contiguous(), p, key.mixed(), *rows)

    @staticmethod
    def backward(ctx, dout: Tensor):
        from dlrm_hstu.ops.counter_dropout.triton import dropout_forward

        p, key, rows = ctx.settings
        return dropout_forward(dout.contiguous(), p, key.mixed(), *rows), None, None, None
