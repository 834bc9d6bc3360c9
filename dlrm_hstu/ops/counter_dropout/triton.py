"""Device functions for the random bits of `reference.py`, equal to it bit for bit, and dropout as a kernel.

T rows, D columns. Other kernels call `row_keys` once for a row and `random_bits` for its elements; all arithmetic is unsigned and wraps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_T = 4
_ELEMENTS_PER_THREAD = 16


@triton.jit
def _mix64(value):
    z = value + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_keys(key, sample, position):
    """uint32 keys (low, folded) of rows named (sample, position): integers of any width. key: int64 scalar, see `signed_key`.

    folded = high ^ (high >> 13), which saves a row's elements one instruction of their ten.
    """
    first = key.to(tl.uint64) + sample.to(tl.int64).to(tl.uint64)
    z = _mix64(_mix64(first) + position.to(tl.int64).to(tl.uint64))
    return z.to(tl.uint32), ((z >> 32) ^ (z >> 45)).to(tl.uint32)


@triton.jit
def random_bits(low, folded, column):
    """int32, uniform over the signed range. low, folded: from `row_keys`; column: int32; shapes broadcast."""
    h = column.to(tl.uint32) * 0x9E3779B9 + low
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13) ^ folded) * 0xC2B2AE35
    return (h ^ (h >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def drop(x, keep, scale):
    """x * scale where kept, 0 elsewhere, whatever x is. Scaled after the choice: before it, the compiler would choose between halves."""
    return tl.where(keep, x, 0.0) * scale


@triton.jit(do_not_specialize=["T", "key", "threshold"])
def _dropout_kernel(
    x_ptr,
    y_ptr,
    sample_ptr,
    position_ptr,
    stride_x,
    T,
    key: tl.int64,
    threshold: tl.int32,
    scale,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    in_rows = row < T
    mask = in_rows[:, None] & (column < D)[None, :]
    low, folded = row_keys(key, tl.load(sample_ptr + row, mask=in_rows, other=0), tl.load(position_ptr + row, mask=in_rows, other=0))
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
    keep = random_bits(low[:, None], folded[:, None], column[None, :]) >= threshold
    y = drop(x, keep, scale)
    tl.store(y_ptr + row[:, None] * D + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def keep_threshold(p: float) -> int:
    """An element is kept where its int32 random bits are at least this. p: drop probability in [0, 1). Raises ValueError outside."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p={p} is not a drop probability; it must be at least 0 and below 1")
    return min(round(p * 2**32) - 2**31, 2**31 - 1)


def signed_key(key: int) -> int:
    """`DropoutKey.mixed()`, in [0, 2^64), as the int64 that a kernel takes."""
    return (key + 2**63) % 2**64 - 2**63


def dropout_forward(x: Tensor, p: float, key: int, sample: Tensor, position: Tensor) -> Tensor:
    """x / (1 - p) where kept, 0 elsewhere, with the mask of `counter_dropout.dropout`; its gradient is the same function of dy.

    x: [T, D], rows may be strided, columns may not. key: `DropoutKey.mixed()`. sample, position: integer [T], contiguous. Returns
    contiguous [T, D] in x's dtype. Raises ValueError on other shapes or strides, or p outside [0, 1).
    """
    rows, columns = x.shape
    if x.stride(1) != 1 and columns > 1:
        raise ValueError(f"dropout: x has column stride {x.stride(1)}; kernels read contiguous columns, so pass a row-strided view")
    check_row_names(sample, position, rows)
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block_d = triton.next_power_of_2(columns)
    if rows:
        _dropout_kernel[(triton.cdiv(rows, _BLOCK_T),)](
            x,
            y,
            sample,
            position,
            x.stride(0),
            rows,
            signed_key(key),
            keep_threshold(p),
            1 / (1 - p),
            D=columns,
            BLOCK_T=_BLOCK_T,
            BLOCK_D=block_d,
            num_warps=min(max(1, _BLOCK_T * block_d // (32 * _ELEMENTS_PER_THREAD)), 16),
        )
    return y


def check_row_names(sample: Tensor, position: Tensor, rows: int) -> None:
    """Raises ValueError unless both are contiguous integer [rows]."""
    for name, tensor in (("sample", sample), ("position", position)):
        if tensor.shape != (rows,) or not tensor.is_contiguous() or tensor.is_floating_point():
            raise ValueError(f"dropout: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be contiguous integers of shape ({rows},)")
