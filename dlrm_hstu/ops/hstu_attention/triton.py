"""HSTU attention in plain Triton: the portable kernels, forward and a deterministic backward, on any GPU and in the interpreter.

A program owns one tile of queries (output, dQ) or of keys (dK, dV) of one (sequence, head) and walks the tiles of the other side:
those that every row sees whole without a mask, the boundary ones with it. Tiles that no row sees are not visited.
With y = alpha / 2 * q.k and t = tanh(y): silu(2y) = y * t + y, and 2 * silu'(2y) = 1 + w with w = y * (1 - t * t) + t.

B sequences, T tokens, H heads, D_QK and D_V head widths, L a sequence's length. rank, history: see `hstu_mask` in reference.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_hstu.ops.hstu_attention.triton_masks import hop, is_visible, keys_of, mask_bits, queries_of, sequence_of


class Tiles(NamedTuple):
    query: int
    key: int
    warps: int
    stages: int


# (device, kernel, head width padded to 64, 128 or 256) -> tiles of 16-bit inputs. "default" fits 64 KiB of shared memory.
TILES = {
    ("default", "forward", 64): Tiles(64, 64, 4, 2),
    ("default", "forward", 128): Tiles(64, 32, 4, 2),
    ("default", "forward", 256): Tiles(32, 32, 4, 1),
    ("default", "dkdv", 64): Tiles(32, 64, 4, 2),
    ("default", "dkdv", 128): Tiles(32, 64, 8, 1),
    ("default", "dkdv", 256): Tiles(16, 32, 4, 1),
    ("default", "dq", 64): Tiles(64, 32, 4, 2),
    ("default", "dq", 128): Tiles(64, 32, 8, 1),
    ("default", "dq", 256): Tiles(32, 16, 4, 1),
    ("sm_90", "forward", 64): Tiles(128, 64, 8, 3),
    ("sm_90", "forward", 128): Tiles(64, 64, 4, 3),
    ("sm_90", "forward", 256): Tiles(128, 64, 8, 2),
    ("sm_90", "dkdv", 64): Tiles(64, 128, 8, 3),
    ("sm_90", "dkdv", 128): Tiles(32, 64, 4, 3),
    ("sm_90", "dkdv", 256): Tiles(32, 64, 8, 2),
    ("sm_90", "dq", 64): Tiles(128, 64, 8, 3),
    ("sm_90", "dq", 128): Tiles(64, 64, 4, 2),
    ("sm_90", "dq", 256): Tiles(64, 64, 8, 2),
}
FP32_TILES = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)}  # 69 KiB at most, on sm_80


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_seq_len: int,
    alpha: float,
    num_targets: Tensor | None = None,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    longest: int,
    out: Tensor | None = None,
) -> Tensor:
    """`dlrm_hstu.ops.hstu_attention` without autograd.

    q, k: [T, H, D_QK]. v: [T, H, D_V]. All of one dtype (fp32, bf16, fp16), any token and head strides, last stride 1, widths up to 256.
    longest: at least the longest length, on the host; it bounds the grid. out: a [T, H, D_V] view to write. Other arguments as there.
    Returns out. Raises ValueError on a dtype, stride or width that does not fit.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    _check(q=q, k=k, v=v, out=out)
    masks = (num_targets, contextual_seq_len, max_attn_len, min_full_attn_seq_len)
    views, scales = (q, k, v, out), (alpha / 2, 1 / max_seq_len)
    _launch("forward", _forward_kernel, views, offsets, masks, scales, longest)
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
    num_targets: Tensor | None = None,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    longest: int,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attention_forward` from dout [T, H, D_V]; bitwise reproducible.

    dq, dk, dv: views of the shapes of q, k, v to write. Other arguments, strides and errors as in `attention_forward`.
    """
    dq, dk, dv = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device) if given is None else given
        for given, like in ((dq, q), (dk, k), (dv, v))
    )
    _check(q=q, k=k, v=v, dout=dout, dq=dq, dk=dk, dv=dv)
    masks = (num_targets, contextual_seq_len, max_attn_len, min_full_attn_seq_len)
    half_alpha, scale = alpha / 2, 1 / max_seq_len
    _launch("dkdv", _dkdv_kernel, (q, k, v, dout, dk, dv), offsets, masks, (half_alpha, half_alpha * scale, scale), longest)
    _launch("dq", _dq_kernel, (q, k, v, dout, dq), offsets, masks, (half_alpha, half_alpha * scale), longest)
    return dq, dk, dv


def _check(**views: Tensor) -> None:
    q = views["q"]
    for name, view in views.items():
        if view.dtype != q.dtype or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"hstu_attention: {name} is {view.dtype} and q {q.dtype}; all must be one of float32, bfloat16, float16")
        if view.stride(-1) != 1:
            raise ValueError(f"hstu_attention: {name} has last stride {view.stride(-1)}, 1 is needed; call contiguous() first")
        if not 0 < view.shape[-1] <= 256:
            raise ValueError(f"hstu_attention: {name} has head width {view.shape[-1]}; 1 to 256 is supported")


def _launch(name, kernel, views, offsets, masks, scales, longest) -> None:
    q, _, v = views[:3]
    heads, block_qk, block_v = q.shape[1], _block(q.shape[2]), _block(v.shape[2])
    tiles = pinned_tiles(name, q.device, q.dtype, max(block_qk, block_v))
    num_targets, contextual, window, min_full = masks
    tiles_per_sequence = triton.cdiv(longest, tiles.key if name == "dkdv" else tiles.query)
    programs = tiles_per_sequence * (offsets.shape[0] - 1) * heads  # one axis: the others end at 65535 programs
    if programs == 0 or q.shape[0] == 0:
        return
    kernel[(programs,)](
        *views,
        offsets,
        num_targets,
        *scales,
        tiles_per_sequence,
        contextual,
        window,
        min_full,
        *(stride for view in views for stride in view.stride()[:2]),
        H=heads,
        D_QK=q.shape[2],
        D_V=v.shape[2],
        BLOCK_QK=block_qk,
        BLOCK_V=block_v,
        BLOCK_QUERY=tiles.query,
        BLOCK_KEY=tiles.key,
        MASKS=mask_bits(num_targets is not None, contextual > 0, window > 0, window > 0 and min_full > 0),
        FAST_TANH=_has_fast_tanh(q),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def pinned_tiles(kernel: str, device: torch.device, dtype: torch.dtype, width: int) -> Tiles:
    """The tiles of `kernel` ("forward", "dkdv", "dq") for a padded head width."""
    width = max(width, 64)
    if dtype == torch.float32:
        return FP32_TILES[width]
    name = "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if _is_nvidia(device) else "default"
    return TILES.get((name, kernel, width)) or TILES["default", kernel, width]


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))  # tl.dot takes no side below 16


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _has_fast_tanh(q: Tensor) -> bool:
    return q.dtype != torch.float32 and _is_nvidia(q.device) and not triton.knobs.runtime.interpret


@triton.jit
def _tanh(y, FAST_TANH: tl.constexpr):
    if FAST_TANH:  # one special-function instruction; exp and a division would be two
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
    else:
        e = tl.exp(-2.0 * tl.abs(y))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(y < 0, -t, t)


@triton.jit
def _load_rows(base, row_stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr):
    """[ROWS, BLOCK_D] from `base`; zeros past column D and, if RAGGED, from row `limit` on."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    pointers = base + rows * row_stride + columns
    if RAGGED and D < BLOCK_D:
        return tl.load(pointers, mask=(rows < limit) & (columns < D), other=0.0)
    elif RAGGED:
        return tl.load(pointers, mask=rows < limit, other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointers, mask=columns < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_rows(base, row_stride, limit, values, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    pointers = base + rows * row_stride + columns
    tl.store(pointers, values.to(base.dtype.element_ty), mask=(rows < limit) & (columns < D))


@triton.jit
def _work(tiles, H: tl.constexpr):
    """This program's (sequence, head, tile); the tiles of a head are neighbours, so that they share its rows in the cache."""
    sequence_head = tl.program_id(0) // tiles
    return sequence_head // H, sequence_head % H, tl.program_id(0) % tiles


# What a batch or a model decides must not be specialized: each new value would compile again, 100 ms and more.
_RUNTIME = ["tiles", "contextual", "window", "min_full"]


@triton.jit(do_not_specialize=_RUNTIME)
def _forward_kernel(
    q, k, v, out, offsets, num_targets, half_alpha, scale, tiles, contextual, window, min_full,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_QUERY: tl.constexpr, BLOCK_KEY: tl.constexpr, MASKS: tl.constexpr, FAST_TANH: tl.constexpr,
):  # fmt: skip
    b, h, tile = _work(tiles, H)
    start, length, history, prefix = sequence_of(offsets, num_targets, contextual, b, MASKS)
    begin = (tl.cdiv(length, BLOCK_QUERY) - 1 - tile) * BLOCK_QUERY  # the newest queries see most keys: they go first
    if begin < 0:
        return
    k, v = k + start * k_row + h * k_head, v + start * v_row + h * v_head
    q_tile = _load_rows(q + (start + begin) * q_row + h * q_head, q_row, length - begin, BLOCK_QUERY, D_QK, BLOCK_QK, True)
    query = begin + tl.arange(0, BLOCK_QUERY)
    acc = tl.zeros((BLOCK_QUERY, BLOCK_V), tl.float32)
    first, inside, inside_end, last, diagonal, stop = keys_of(
        begin, tl.minimum(begin + BLOCK_QUERY, length), history, prefix, window, min_full, BLOCK_KEY, MASKS
    )
    for BOUNDARY in tl.static_range(2):
        if BOUNDARY:
            run, run_end = first, stop - (inside_end - inside) - (diagonal - last)
        else:
            run, run_end = inside, inside_end
        for t in tl.range(run, run_end):
            place = t * BLOCK_KEY
            if BOUNDARY:
                place = hop(hop(t, inside, inside_end), last, diagonal) * BLOCK_KEY
            k_tile = _load_rows(k + place.to(tl.int64) * k_row, k_row, length - place, BLOCK_KEY, D_QK, BLOCK_QK, BOUNDARY)
            v_tile = _load_rows(v + place.to(tl.int64) * v_row, v_row, length - place, BLOCK_KEY, D_V, BLOCK_V, BOUNDARY)
            y = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * half_alpha
            p = y * _tanh(y, FAST_TANH) + y
            if BOUNDARY:
                key = place + tl.arange(0, BLOCK_KEY)
                p = tl.where(is_visible(query[:, None], key[None, :], history, prefix, window, min_full, MASKS), p, 0.0)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    _store_rows(out + (start + begin) * out_row + h * out_head, out_row, length - begin, acc * scale, BLOCK_QUERY, D_V, BLOCK_V)


@triton.jit(do_not_specialize=_RUNTIME)
def _dkdv_kernel(
    q, k, v, dout, dk, dv, offsets, num_targets, half_alpha, scale_dk, scale_dv, tiles, contextual, window, min_full,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, dk_row, dk_head, dv_row, dv_head,
    H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_QUERY: tl.constexpr, BLOCK_KEY: tl.constexpr, MASKS: tl.constexpr, FAST_TANH: tl.constexpr,
):  # fmt: skip
    """Scores are held transposed, [keys, queries], so that dV's and dK's products take them from registers."""
    b, h, tile = _work(tiles, H)
    start, length, history, prefix = sequence_of(offsets, num_targets, contextual, b, MASKS)
    begin = tile * BLOCK_KEY  # most queries see the oldest keys: they go first
    if begin >= length:
        return
    q, dout = q + start * q_row + h * q_head, dout + start * dout_row + h * dout_head
    k_tile = _load_rows(k + (start + begin) * k_row + h * k_head, k_row, length - begin, BLOCK_KEY, D_QK, BLOCK_QK, True)
    v_tile = _load_rows(v + (start + begin) * v_row + h * v_head, v_row, length - begin, BLOCK_KEY, D_V, BLOCK_V, True)
    key = begin + tl.arange(0, BLOCK_KEY)
    dk_acc = tl.zeros((BLOCK_KEY, BLOCK_QK), tl.float32)
    dv_acc = tl.zeros((BLOCK_KEY, BLOCK_V), tl.float32)
    opening, opening_end, first, inside, inside_end, last, rest, full, full_end, stop = queries_of(
        begin, tl.minimum(begin + BLOCK_KEY, length), length, history, prefix, window, min_full, BLOCK_QUERY, MASKS
    )
    interior = (inside_end - inside) + (full_end - full)
    for BOUNDARY in tl.static_range(1, -1, -1):  # boundary first: the hot loop then keeps fewer scalars (411 instructions, not 470)
        if BOUNDARY:
            run, run_end = opening, stop - interior - (first - opening_end) - (rest - last)
        else:
            run, run_end = inside, inside + interior
        for t in tl.range(run, run_end):
            if BOUNDARY:
                place = hop(hop(hop(hop(t, opening_end, first), inside, inside_end), last, rest), full, full_end) * BLOCK_QUERY
            else:
                place = hop(t, inside_end, full) * BLOCK_QUERY
            q_tile = _load_rows(q + place.to(tl.int64) * q_row, q_row, length - place, BLOCK_QUERY, D_QK, BLOCK_QK, BOUNDARY)
            dout_tile = _load_rows(dout + place.to(tl.int64) * dout_row, dout_row, length - place, BLOCK_QUERY, D_V, BLOCK_V, BOUNDARY)
            y = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * half_alpha
            t_y = _tanh(y, FAST_TANH)
            p = y * t_y + y
            if BOUNDARY:
                query = place + tl.arange(0, BLOCK_QUERY)
                visible = is_visible(query[None, :], key[:, None], history, prefix, window, min_full, MASKS)
                p = tl.where(visible, p, 0.0)
            dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="ieee")
            dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
            ds = dp * (y * (1.0 - t_y * t_y) + t_y) + dp
            if BOUNDARY:
                ds = tl.where(visible, ds, 0.0)
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    _store_rows(dk + (start + begin) * dk_row + h * dk_head, dk_row, length - begin, dk_acc * scale_dk, BLOCK_KEY, D_QK, BLOCK_QK)
    _store_rows(dv + (start + begin) * dv_row + h * dv_head, dv_row, length - begin, dv_acc * scale_dv, BLOCK_KEY, D_V, BLOCK_V)


@triton.jit(do_not_specialize=_RUNTIME)
def _dq_kernel(
    q, k, v, dout, dq, offsets, num_targets, half_alpha, scale, tiles, contextual, window, min_full,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, dq_row, dq_head,
    H: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_QUERY: tl.constexpr, BLOCK_KEY: tl.constexpr, MASKS: tl.constexpr, FAST_TANH: tl.constexpr,
):  # fmt: skip
    b, h, tile = _work(tiles, H)
    start, length, history, prefix = sequence_of(offsets, num_targets, contextual, b, MASKS)
    begin = (tl.cdiv(length, BLOCK_QUERY) - 1 - tile) * BLOCK_QUERY
    if begin < 0:
        return
    k, v = k + start * k_row + h * k_head, v + start * v_row + h * v_head
    q_tile = _load_rows(q + (start + begin) * q_row + h * q_head, q_row, length - begin, BLOCK_QUERY, D_QK, BLOCK_QK, True)
    dout_tile = _load_rows(dout + (start + begin) * dout_row + h * dout_head, dout_row, length - begin, BLOCK_QUERY, D_V, BLOCK_V, True)
    query = begin + tl.arange(0, BLOCK_QUERY)
    acc = tl.zeros((BLOCK_QUERY, BLOCK_QK), tl.float32)
    first, inside, inside_end, last, diagonal, stop = keys_of(
        begin, tl.minimum(begin + BLOCK_QUERY, length), history, prefix, window, min_full, BLOCK_KEY, MASKS
    )
    for BOUNDARY in tl.static_range(2):
        if BOUNDARY:
            run, run_end = first, stop - (inside_end - inside) - (diagonal - last)
        else:
            run, run_end = inside, inside_end
        for t in tl.range(run, run_end):
            place = t * BLOCK_KEY
            if BOUNDARY:
                place = hop(hop(t, inside, inside_end), last, diagonal) * BLOCK_KEY
            k_tile = _load_rows(k + place.to(tl.int64) * k_row, k_row, length - place, BLOCK_KEY, D_QK, BLOCK_QK, BOUNDARY)
            v_tile = _load_rows(v + place.to(tl.int64) * v_row, v_row, length - place, BLOCK_KEY, D_V, BLOCK_V, BOUNDARY)
            y = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * half_alpha
            t_y = _tanh(y, FAST_TANH)
            dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
            ds = dp * (y * (1.0 - t_y * t_y) + t_y) + dp
            if BOUNDARY:
                key = place + tl.arange(0, BLOCK_KEY)
                ds = tl.where(is_visible(query[:, None], key[None, :], history, prefix, window, min_full, MASKS), ds, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    _store_rows(dq + (start + begin) * dq_row + h * dq_head, dq_row, length - begin, acc * scale, BLOCK_QUERY, D_QK, BLOCK_QK)
