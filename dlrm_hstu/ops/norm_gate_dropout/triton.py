"""dropout([silu(u), a, LN(a) * silu(u)]) as two kernels: one pass forward, one backward, masks made again rather than stored.

T rows, D columns of u and of the attention a; y has the three blocks side by side, 3 * D columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_hstu.ops.counter_dropout.triton import check_row_names, drop, keep_threshold, random_bits, row_keys, signed_key
from dlrm_hstu.ops.layer_norm.triton import (
    RowLaunch,
    check_affine,
    check_columns,
    norm_backward,
    row_launch,
    row_statistics,
    row_tile,
    store_partials,
)

_FORWARD = {"default": RowLaunch(rows=1, warps=1, stages=3, programs=48)}
_BACKWARD = {"default": RowLaunch(rows=1, warps=2, stages=3, programs=48)}


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)) of fp32, to a few units in the last place. FAST: 4 instructions for 12, as no denormal survives the 1 +."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(x)


@triton.jit
def _keep(sample, position, key, column, threshold, D: tl.constexpr):
    """Which elements [BLOCK_T, BLOCK_D] of y's three blocks stay."""
    low, folded = row_keys(key, sample, position)
    low, folded, column = low[:, None], folded[:, None], column[None, :]
    keep_gate = random_bits(low, folded, column) >= threshold
    keep_a = random_bits(low, folded, column + D) >= threshold
    keep_gated = random_bits(low, folded, column + 2 * D) >= threshold
    return keep_gate, keep_a, keep_gated


@triton.jit(do_not_specialize=["T", "key", "threshold"])
def _forward_kernel(
    a_ptr,
    u_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    sample_ptr,
    position_ptr,
    stride_a,
    stride_u,
    stride_y,
    T,
    eps,
    key: tl.int64,
    threshold: tl.int32,
    scale,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    local = tl.arange(0, BLOCK_T)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * BLOCK_T
        in_rows = local < T - first
        mask = in_rows[:, None] & inside[None, :]
        a = tl.load(row_tile(a_ptr, stride_a, first, local, column), mask=mask, other=0.0).to(tl.float32)
        u = tl.load(row_tile(u_ptr, stride_u, first, local, column), mask=mask, other=0.0).to(tl.float32)
        if sample_ptr is not None:
            sample = tl.load(sample_ptr + first + local, mask=in_rows, other=0)
            position = tl.load(position_ptr + first + local, mask=in_rows, other=0)
        mean, rstd = row_statistics(a, inside, D, eps)
        gate = u * _sigmoid(u, FAST)
        gated = ((a - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]) * gate
        if sample_ptr is not None:
            keep_gate, keep_a, keep_gated = _keep(sample, position, key, column, threshold, D)
            gate, a, gated = drop(gate, keep_gate, scale), drop(a, keep_a, scale), drop(gated, keep_gated, scale)
        y_tile = row_tile(y_ptr, stride_y, first, local, column)
        tl.store(y_tile, gate.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_tile + D, a.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_tile + 2 * D, gated.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(mean_ptr + first + local, mean, mask=in_rows)
        tl.store(rstd_ptr + first + local, rstd, mask=in_rows)


@triton.jit(do_not_specialize=["T", "key", "threshold"])
def _backward_kernel(
    dy_ptr,
    a_ptr,
    u_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    sample_ptr,
    position_ptr,
    da_ptr,
    du_ptr,
    y_ptr,
    partial_ptr,
    stride_dy,
    stride_a,
    stride_u,
    stride_da,
    stride_du,
    stride_y,
    T,
    key: tl.int64,
    threshold: tl.int32,
    scale,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    local = tl.arange(0, BLOCK_T)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    dweight = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * BLOCK_T
        in_rows = local < T - first
        mask = in_rows[:, None] & inside[None, :]
        dy_tile = row_tile(dy_ptr, stride_dy, first, local, column)
        d_gate = tl.load(dy_tile, mask=mask, other=0.0).to(tl.float32)
        d_a = tl.load(dy_tile + D, mask=mask, other=0.0).to(tl.float32)
        d_gated = tl.load(dy_tile + 2 * D, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(row_tile(a_ptr, stride_a, first, local, column), mask=mask, other=0.0).to(tl.float32)
        u = tl.load(row_tile(u_ptr, stride_u, first, local, column), mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + first + local, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + first + local, mask=in_rows, other=0.0)
        if sample_ptr is not None:
            sample = tl.load(sample_ptr + first + local, mask=in_rows, other=0)
            position = tl.load(position_ptr + first + local, mask=in_rows, other=0)
        sigmoid = _sigmoid(u, FAST)
        gate = u * sigmoid
        normed = (a - mean[:, None]) * rstd[:, None]
        affine = normed * weight[None, :] + bias[None, :]
        if y_ptr is not None:
            y_gate, y_a, y_gated = gate, a, affine * gate
        if sample_ptr is not None:
            keep_gate, keep_a, keep_gated = _keep(sample, position, key, column, threshold, D)
            d_gate, d_a, d_gated = drop(d_gate, keep_gate, scale), drop(d_a, keep_a, scale), drop(d_gated, keep_gated, scale)
            if y_ptr is not None:
                y_gate, y_a, y_gated = drop(y_gate, keep_gate, scale), drop(y_a, keep_a, scale), drop(y_gated, keep_gated, scale)
        if y_ptr is not None:  # y may be dy: loads and stores of a tile have one layout, so a thread overwrites only what it has read
            y_tile = row_tile(y_ptr, stride_y, first, local, column)
            tl.store(y_tile, y_gate.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_tile + D, y_a.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_tile + 2 * D, y_gated.to(y_ptr.dtype.element_ty), mask=mask)
        du = (d_gate + d_gated * affine) * sigmoid * (1.0 + u * (1.0 - sigmoid))
        tl.store(row_tile(du_ptr, stride_du, first, local, column), du.to(du_ptr.dtype.element_ty), mask=mask)
        d_affine = d_gated * gate
        dweight += d_affine * normed
        dbias += d_affine
        da = d_a + norm_backward(d_affine * weight[None, :], normed, rstd, D)
        tl.store(row_tile(da_ptr, stride_da, first, local, column), da.to(da_ptr.dtype.element_ty), mask=mask)
    store_partials(partial_ptr, dweight, dbias, column, inside, D)


def norm_gate_dropout_forward(
    attention: Tensor,
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    p: float,
    key: int | None,
    rows: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), y = dropout([silu(u), a, LN(a) * silu(u)]).

    attention, u: [T, D], rows may be strided; u is what silu is applied to. weight, bias: fp32 [D], of the norm. p: drop probability in
    [0, 1). key: `DropoutKey.mixed()`. rows: (sample, position), integer [T]. No dropout when p is 0 or key is None. y: contiguous
    [T, 3 * D] in u's dtype. mean, rstd: fp32 [T]. Raises ValueError on other shapes, strided columns or p outside its range.
    """
    check_columns("norm_gate_dropout", attention.shape, attention=attention, u=u)
    check_affine("norm_gate_dropout", u.shape[1], weight, bias)
    y = torch.empty(len(u), 3 * u.shape[1], dtype=u.dtype, device=u.device)
    mean = torch.empty(len(u), dtype=torch.float32, device=u.device)
    rstd = torch.empty_like(mean)
    names, draw = _dropout_arguments(p, key, rows, len(u))
    grid, options = row_launch(_FORWARD, u)
    if len(u):
        strides = attention.stride(0), u.stride(0), y.stride(0)
        _forward_kernel[grid](attention, u, weight, bias, y, mean, rstd, *names, *strides, len(u), eps, *draw, FAST=_has_ptx(u), **options)
    return y, mean, rstd


def norm_gate_dropout_backward(
    dy: Tensor,
    attention: Tensor,
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    p: float,
    key: int | None,
    rows: tuple[Tensor, Tensor] | None,
    du: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dattention, du, dweight, dbias) of `norm_gate_dropout_forward`; the same bits on every run on one kind of GPU.

    dy: [T, 3 * D], rows may be strided. mean, rstd: from the forward; p, key, rows: as in the forward. du: [T, D] to write into, rows may
    be strided; by default new. y: [T, 3 * D] to write the forward's y into again, in the same pass; may be dy itself. dattention:
    contiguous, in attention's dtype. dweight, dbias: fp32 [D]. Raises ValueError as the forward.
    """
    da = torch.empty(attention.shape, dtype=attention.dtype, device=u.device)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device) if du is None else du
    check_columns("norm_gate_dropout", attention.shape, attention=attention, u=u, du=du)
    check_columns("norm_gate_dropout", (len(u), 3 * u.shape[1]), dy=dy, **({} if y is None else {"y": y}))
    check_affine("norm_gate_dropout", u.shape[1], weight, bias)
    names, draw = _dropout_arguments(p, key, rows, len(u))
    grid, options = row_launch(_BACKWARD, u)
    partials = torch.empty(*grid, 2, u.shape[1], dtype=torch.float32, device=u.device)
    if len(u):
        tensors = dy, attention, u, weight, bias, mean, rstd, *names, da, du, y, partials
        strides = [tensor.stride(0) for tensor in (dy, attention, u, da, du, dy if y is None else y)]
        _backward_kernel[grid](*tensors, *strides, len(u), *draw, FAST=_has_ptx(u), **options)
    dweight, dbias = partials.sum(0)
    return da, du, dweight, dbias


def _has_ptx(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None


def _dropout_arguments(p: float, key: int | None, rows: tuple[Tensor, Tensor] | None, length: int) -> tuple[tuple, tuple]:
    """What names the rows, (None, None) for no dropout, and (key, threshold, scale)."""
    threshold = keep_threshold(p)
    if p == 0 or key is None:
        return (None, None), (0, 0, 1.0)
    check_row_names(*rows, length)
    return tuple(rows), (signed_key(key), threshold, 1 / (1 - p))
