"""HSTU attention on a GPU: the Hopper kernels where they run, the portable ones elsewhere, and their autograd node."""

import torch
from torch import Tensor

from dlrm_hstu.ops.hstu_attention import hopper, triton


def attention_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, backend: str = "auto", **settings) -> Tensor:
    """out [T, H, d_v]. settings: as `hstu_attention`, and host numbers longest and max_num_targets (None where unknown)."""
    kernels, settings = _pick(backend, q, k, v, settings)
    return kernels.attention_forward(q, k, v, offsets, **settings)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, dq: Tensor, dk: Tensor, dv: Tensor, backend: str = "auto", **settings
) -> None:
    """Gradients into the views dq, dk and dv, shaped as q, k and v."""
    kernels, settings = _pick(backend, q, k, v, settings)
    kernels.attention_backward(dout, q, k, v, offsets, dq=dq, dk=dk, dv=dv, **settings)


def hstu_attention_kernels(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, backend: str, **settings) -> Tensor:
    """See `dlrm_hstu.ops.hstu_attention`."""
    return _Attention.apply(q, k, v, offsets, {"backend": backend, "longest": settings["max_seq_len"], "max_num_targets": None, **settings})


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets, settings):
        ctx.save_for_backward(q, k, v, offsets)
        ctx.settings = settings
        return attention_forward(q, k, v, offsets, **settings)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, offsets = ctx.saved_tensors
        gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)]
        dq, dk, dv = gradients
        attention_backward(dout.contiguous(), q, k, v, offsets, dq=dq, dk=dk, dv=dv, **ctx.settings)
        return *gradients, None, None


def _pick(backend: str, q: Tensor, k: Tensor, v: Tensor, settings: dict):
    reason = hopper.supports(q, k, v, **settings) if backend != "triton" else "not asked for"
    if reason is None:
        return hopper, settings
    if backend == "hopper":
        raise ValueError(f"hstu_attention: backend='hopper' cannot run this: {reason}; choose auto or triton")
    return triton, {name: value for name, value in settings.items() if name != "max_num_targets"}
