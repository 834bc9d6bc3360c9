"""Layer norm as two kernels: programs that stay, each walking its share of the rows a tile at a time.

T rows, D columns.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class RowLaunch:
    """rows: in a tile. warps: for each 512 columns. stages: 1 for no tile loaded ahead, 3 for one, 4 for two. programs: on each
    multiprocessor; several times what is resident, or what is resident, so that none runs a last round nearly alone.
    """

    rows: int
    warps: int
    stages: int
    programs: int


_FORWARD = {"default": RowLaunch(rows=2, warps=1, stages=1, programs=84)}
_BACKWARD = {"default": RowLaunch(rows=1, warps=1, stages=3, programs=84)}


@triton.jit
def row_tile(ptr, stride, first, local, column):
    """Pointers [BLOCK_T, BLOCK_D] to rows `first` (int64) + `local` [BLOCK_T]; only the scalar part needs 64 bits."""
    return ptr + first * stride + local[:, None] * stride + column[None, :]


@triton.jit
def row_statistics(x, inside, D: tl.constexpr, eps):
    """Mean and 1 / sqrt(variance + eps) of each row of fp32 x [BLOCK_T, BLOCK_D], which is 0 where not `inside` [BLOCK_D]."""
    mean = tl.sum(x, axis=1) / D
    centered = tl.where(inside[None, :], x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centered * centered, axis=1) / D + eps)


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    stride_x,
    stride_y,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
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
        x = tl.load(row_tile(x_ptr, stride_x, first, local, column), mask=mask, other=0.0).to(tl.float32)
        mean, rstd = row_statistics(x, inside, D, eps)
        y = (x - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(row_tile(y_ptr, stride_y, first, local, column), y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(mean_ptr + first + local, mean, mask=in_rows)
        tl.store(rstd_ptr + first + local, rstd, mask=in_rows)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    residual_ptr,
    dx_ptr,
    partial_ptr,
    stride_dy,
    stride_x,
    stride_residual,
    stride_dx,
    T,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    local = tl.arange(0, BLOCK_T)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    dweight = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * BLOCK_T
        in_rows = local < T - first
        mask = in_rows[:, None] & inside[None, :]
        dy = tl.load(row_tile(dy_ptr, stride_dy, first, local, column), mask=mask, other=0.0).to(tl.float32)
        x = tl.load(row_tile(x_ptr, stride_x, first, local, column), mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(row_tile(residual_ptr, stride_residual, first, local, column), mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + first + local, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + first + local, mask=in_rows, other=0.0)
        normed = (x - mean[:, None]) * rstd[:, None]
        dweight += dy * normed
        dbias += dy
        dx = norm_backward(dy * weight[None, :], normed, rstd, D)
        if residual_ptr is not None:
            dx += residual
        tl.store(row_tile(dx_ptr, stride_dx, first, local, column), dx.to(dx_ptr.dtype.element_ty), mask=mask)
    store_partials(partial_ptr, dweight, dbias, column, inside, D)


@triton.jit
def norm_backward(g, normed, rstd, D: tl.constexpr):
    """rstd * (g - mean(g) - normed * mean(g * normed)): from the gradient g of `normed`, 0 in columns past D, to that of the input."""
    mean_g = tl.sum(g, axis=1) / D
    mean_gn = tl.sum(g * normed, axis=1) / D
    return rstd[:, None] * (g - mean_g[:, None] - normed * mean_gn[:, None])


@triton.jit
def store_partials(partial_ptr, dweight, dbias, column, inside, D: tl.constexpr):
    """This program's sums of the weight and bias gradients, as row `program` of partials [programs, 2, D]."""
    partial_ptr += tl.program_id(0) * 2 * D
    tl.store(partial_ptr + column, tl.sum(dweight, axis=0), mask=inside)
    tl.store(partial_ptr + D + column, tl.sum(dbias, axis=0), mask=inside)


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Affine layer norm over the last axis: (y, mean, rstd).

    x: [T, D], rows may be strided. weight, bias: fp32 [D]. y: contiguous [T, D] in x's dtype. mean, rstd: fp32 [T], rstd =
    1 / sqrt(variance + eps). Raises ValueError on other shapes or on strided columns.
    """
    check_columns("layer_norm", x.shape, x=x)
    check_affine("layer_norm", x.shape[1], weight, bias)
    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    grid, options = row_launch(_FORWARD, x)
    if rows:
        _forward_kernel[grid](x, weight, bias, y, mean, rstd, x.stride(0), y.stride(0), rows, eps, **options)
    return y, mean, rstd


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    residual_gradient: Tensor | None = None,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx + residual_gradient, dweight, dbias) of `layer_norm_forward`; the same bits on every run on one kind of GPU.

    dy, x, residual_gradient: [T, D], rows may be strided. mean, rstd: from the forward. dx: [T, D] to write into, rows may be strided, may
    be dy itself; by default new, in x's dtype. dweight, dbias: fp32 [D]. Raises ValueError as the forward.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    residual = {} if residual_gradient is None else {"residual_gradient": residual_gradient}
    check_columns("layer_norm", x.shape, dy=dy, x=x, dx=dx, **residual)
    check_affine("layer_norm", x.shape[1], weight)
    grid, options = row_launch(_BACKWARD, x)
    partials = torch.empty(*grid, 2, x.shape[1], dtype=torch.float32, device=x.device)
    if len(x):
        stride_residual = residual_gradient.stride(0) if residual else 0
        strides = dy.stride(0), x.stride(0), stride_residual, dx.stride(0)
        _backward_kernel[grid](dy, x, weight, mean, rstd, residual_gradient, dx, partials, *strides, len(x), **options)
    dweight, dbias = partials.sum(0)
    return dx, dweight, dbias


def row_launch(configs: dict, x: Tensor) -> tuple[tuple[int], dict]:
    """Grid and launch options of a kernel of this family for x [T, D], from its pinned configurations."""
    multiprocessors, capability = _device(x.device)
    config = configs.get(capability, configs["default"])
    block_d = triton.next_power_of_2(x.shape[1])
    grid = (min(triton.cdiv(len(x), config.rows), multiprocessors * config.programs),)
    warps = max(1, config.warps * block_d // 512)
    return grid, dict(D=x.shape[1], BLOCK_T=config.rows, BLOCK_D=block_d, STAGES=config.stages, num_warps=warps)


@lru_cache
def _device(device: torch.device) -> tuple[int, tuple[int, int] | None]:
    """(multiprocessors, capability). The interpreter has one, so that a test of 70 rows walks several tiles in a program."""
    if device.type != "cuda":
        return 1, None
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def check_columns(op: str, shape: tuple[int, int], **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors have this shape and contiguous columns."""
    for name, tensor in tensors.items():
        if tensor.shape != shape or tensor.stride(1) != 1:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; it must be {tuple(shape)} with column stride 1"
            )


def check_affine(op: str, columns: int, *parameters: Tensor) -> None:
    """Raises ValueError unless all are contiguous fp32 [columns]."""
    for tensor in parameters:
        if tensor.shape != (columns,) or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{op}: weight and bias must be contiguous fp32 [{columns}], got {tensor.dtype} {tuple(tensor.shape)}")
