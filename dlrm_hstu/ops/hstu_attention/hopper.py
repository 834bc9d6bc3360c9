"""HSTU attention on Hopper (sm_90a), bf16, heads 128 wide: what the Gluon kernels run, and how they are launched.

T tokens, B sequences, H heads, D = 128 head width. Imports Triton only when a kernel is launched.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

D = 128
ROWS = 64  # of a computing warpgroup; two of them share a tile


class ForwardConfig(NamedTuple):
    """block_n: keys a tile. ring: tiles of K and of V in flight. registers: per thread of a computing warpgroup."""

    block_n: int = 128
    ring: int = 2
    registers: int = 240
    persistent: bool = True
    unroll: bool = True


class BackwardConfig(NamedTuple):
    """ring: tiles of Q and of dO in flight, query_ring: of K and of V in the separate kernel for dQ. Tiles are 64 rows."""

    ring: int = 2
    query_ring: int = 3
    registers: int = 240
    persistent: bool = True


FORWARD = {"sm_90": ForwardConfig()}
BACKWARD = {"sm_90": BackwardConfig()}


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    **_settings,
) -> str | None:
    """None if these kernels can run it, else why not. Takes all keywords of `attention_forward`; targets are no obstacle."""
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU; the tensors are on {q.device}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        return f"needs compute capability 9.0; {q.device} has {capability[0]}.{capability[1]}"
    if contextual_seq_len or max_attn_len or min_full_attn_seq_len:
        return "has no contextual prefix and no windows"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if reason := _tile_obstacle(tensor):
            return f"{name} {reason}"
    return _missing_gluon()


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_seq_len: int,
    alpha: float,
    longest: int,
    num_targets: Tensor | None = None,
    max_num_targets: int | None = None,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """out [T, H, 128] as `hstu_attention` defines it; into the view `out` if given.

    q, k, v: bf16 [T, H, 128], views of a wider buffer or not. offsets: int32 or int64 [B + 1]. longest: at least the longest length;
    rows past it would stay unwritten. max_num_targets: a host upper bound of num_targets; up to 1, the mask is causal. Rows of other
    sequences never reach a result, whatever they hold. Raises ValueError on what `supports` declines.
    """
    _require(q, k, v, contextual_seq_len, max_attn_len, min_full_attn_seq_len)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    _require_rows("out", out, q)
    heads, sequences = q.shape[1], offsets.numel() - 1
    if q.shape[0] == 0:
        return out
    from dlrm_hstu.ops.hstu_attention.hopper_forward import forward_kernel

    config = FORWARD["sm_90"]
    targets = _targets(num_targets, max_num_targets)
    items_per_head = -(-longest // (2 * ROWS))
    items = sequences * heads * items_per_head
    with torch.cuda.device(q.device):
        grid, counter = _grid(items, config.persistent, q.device)
        forward_kernel[grid](
            _descriptor(q, ROWS), _descriptor(k, config.block_n), _descriptor(v, config.block_n), out, offsets, targets, counter,
            out.stride(0), items, items_per_head, alpha / 2, 1 / max_seq_len, heads, config.ring, config.registers, targets is not None,
            config.persistent, config.unroll, num_warps=4,
        )  # fmt: skip
    return out


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_seq_len: int,
    alpha: float,
    longest: int,
    num_targets: Tensor | None = None,
    max_num_targets: int | None = None,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), bf16 [T, H, 128], into the views given for them; arguments and errors as `attention_forward`.

    dq is summed in fp32 in an order that varies from run to run, in a buffer of 4 * T * H * 128 bytes; deterministic=True makes it in a
    second kernel without that buffer, bitwise reproducibly. dk and dv are always reproducible.
    """
    _require(q, k, v, contextual_seq_len, max_attn_len, min_full_attn_seq_len)
    dq, dk, dv = (
        torch.empty_like(like, memory_format=torch.contiguous_format) if given is None else given
        for given, like in ((dq, q), (dk, k), (dv, v))
    )
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        _require_rows(name, tensor, q)
    if q.shape[0] == 0:
        return dq, dk, dv
    if dout.shape != v.shape or dout.dtype != v.dtype:
        raise ValueError(f"dout {tuple(dout.shape)} {dout.dtype}: must be as v, {tuple(v.shape)} {v.dtype}")
    if _tile_obstacle(dout):
        dout = dout.contiguous()
    from dlrm_hstu.ops.hstu_attention.hopper_backward import cast_kernel, key_kernel
    from dlrm_hstu.ops.hstu_attention.hopper_query import query_kernel

    config = BACKWARD["sm_90"]
    targets = _targets(num_targets, max_num_targets)
    (tokens, heads, _), sequences = q.shape, offsets.numel() - 1
    inputs = [_descriptor(tensor, ROWS) for tensor in (q, dout, k, v)]
    scale = alpha / 2 / max_seq_len
    items_per_head = -(-longest // (4 * ROWS))
    items = sequences * heads * items_per_head
    fused = not deterministic
    with torch.cuda.device(q.device):
        sums = torch.zeros(tokens if fused else ROWS, heads * D, dtype=torch.float32, device=q.device)
        grid, counter = _grid(items, config.persistent, q.device)
        key_kernel[grid](
            *inputs, _descriptor(sums.unflatten(1, (heads, D)), ROWS, D // 2), dk, dv, offsets, targets, counter, dk.stride(0),
            dv.stride(0), items, items_per_head, alpha / 2, scale, 1 / max_seq_len, heads, config.ring, config.registers, fused,
            targets is not None, config.persistent, num_warps=4,
        )  # fmt: skip
        if fused:
            block = 4096
            cast_kernel[(-(-sums.numel() // block),)](sums, dq, dq.stride(0), scale, sums.numel(), heads * D, block, num_warps=8)
        else:
            tiles = -(-longest // (2 * ROWS))
            query_kernel[(sequences * heads * tiles,)](
                *inputs, dq, offsets, targets, dq.stride(0), tiles, alpha / 2, scale, heads, config.query_ring, config.registers,
                targets is not None, num_warps=4,
            )  # fmt: skip
    return dq, dk, dv


def _descriptor(tensor: Tensor, rows: int, columns: int = D):
    """A tile of `rows` tokens and `columns` of the [T, H * D] view, for the tensor memory accelerator."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    shape, strides = [tensor.shape[0], tensor.shape[1] * D], [tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


def _grid(items: int, persistent: bool, device: torch.device) -> tuple[tuple[int], Tensor | None]:
    if not persistent:
        return (items,), None
    return (min(items, _multiprocessors(device)),), torch.zeros(1, dtype=torch.int32, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _targets(num_targets: Tensor | None, max_num_targets: int | None) -> Tensor | None:
    """What the kernels must know of targets: nothing if no sequence has two."""
    if num_targets is None or (max_num_targets is not None and max_num_targets <= 1):
        return None
    return num_targets.contiguous()


def _require(q: Tensor, k: Tensor, v: Tensor, contextual_seq_len: int, max_attn_len: int, min_full_attn_seq_len: int) -> None:
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: must have one shape")
    masks = dict(contextual_seq_len=contextual_seq_len, max_attn_len=max_attn_len, min_full_attn_seq_len=min_full_attn_seq_len)
    if reason := supports(q, k, v, **masks):
        raise ValueError(f"hstu_attention on Hopper {reason}; use the portable kernels")


def _require_rows(name: str, tensor: Tensor, q: Tensor) -> None:
    dense = tensor.stride(2) == 1 and (tensor.shape[1] == 1 or tensor.stride(1) == D)
    if tensor.shape != q.shape or tensor.dtype != q.dtype or not dense:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}: must be {tuple(q.shape)} {q.dtype}, rows dense"
        )


def _tile_obstacle(tensor: Tensor) -> str | None:
    """Why the tensor memory accelerator cannot read tiles of it."""
    if tensor.dtype != torch.bfloat16:
        return f"is {tensor.dtype}, must be bfloat16"
    if tensor.shape[2] != D:
        return f"has heads {tensor.shape[2]} wide, must be {D}"
    if tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != D):
        return f"has strides {tensor.stride()}: a token's heads must be dense"
    if tensor.stride(0) % 8 or tensor.data_ptr() % 16:
        return f"has row stride {tensor.stride(0)} at address {tensor.data_ptr():#x}: both must be multiples of 16 bytes"
    return None


@cache
def _missing_gluon() -> str | None:
    try:
        from dlrm_hstu.ops.hstu_attention import hopper_backward, hopper_forward, hopper_query  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs Triton 3.6 or 3.7 with Gluon: {error}"
    return None
