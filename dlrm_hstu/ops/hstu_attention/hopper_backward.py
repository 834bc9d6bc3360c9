"""HSTU attention backward for Hopper (sm_90a): one loading and two computing warpgroups of 64 keys each.

T tokens, H heads, D head width, n a sequence's length. A work item is a pair of 128-key tiles of one (sequence, head), one near the start
and one near the end, so that all items of a sequence cost the same. Scores are held transposed, S^T = K Q^T: P^T and dS^T then feed
dV = P^T dO and dK = dS^T Q straight from registers. alpha, the 1/2 of silu(2y) = y + y tanh(y), and 1/N are applied in the epilogues.

FUSED: dS^T also goes through shared memory into dQ = dS K, each worker half of the columns, one tile later; TMA adds it to zeroed fp32
[T, H * D], in no fixed order, and `cast_kernel` scales and rounds. Otherwise `hopper_query.query_kernel` makes dQ, bitwise reproducibly.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dlrm_hstu.ops.hstu_attention.hopper_device import (
    after,
    allocate_barriers,
    block_barrier,
    find_item,
    load_clean,
    post_item,
    put_rows,
    read_item,
    tanh,
    tma_add,
    uniform,
    visible,
)


@gluon.jit
def _key_tile(half, n, pair, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    """First key of the pair's tile `half`, and its number of query tiles."""
    tiles = (n + 2 * ROWS - 1) // (2 * ROWS)
    n0 = gl.where(half == 0, pair, tiles - 1 - pair) * (2 * ROWS)
    return n0, (n - n0 + BLOCK_M - 1) // BLOCK_M


@gluon.jit
def _halves(n, pair, ROWS: gl.constexpr):
    return gl.minimum((n + 2 * ROWS - 1) // (2 * ROWS) - 2 * pair, 2)  # the middle tile of an odd count stands alone


@gluon.jit
def _load_queries(u, c, qd, dod, q_s, do_s, q_full, do_full, q_free, do_free, edge, edges, row0, n0, n, col):
    """Query tile u from key n0 on, into ring position c."""
    RING: gl.constexpr = q_s.type.shape[0]
    BLOCK_M: gl.constexpr = q_s.type.shape[1]
    b = c % RING
    phase = ((c // RING) & 1) ^ 1  # a fresh barrier passes parity 1
    m0 = n0 + u * BLOCK_M
    mbarrier.wait(q_free.index(b), phase)
    edges = load_clean(qd, row0 + m0, col, q_s.index(b), q_full.index(b), edge, edges, n - m0)
    mbarrier.wait(do_free.index(b), phase)
    return load_clean(dod, row0 + m0, col, do_s.index(b), do_full.index(b), edge, edges, n - m0)


@gluon.jit
def _produce(qd, dod, kd, vd, offsets, num_targets, counter, items, items_per_head, q_s, do_s, k_s, v_s, slot, slot_full, slot_free,
             k_full, v_full, kv_free, q_full, do_full, q_free, do_free, edge, H: gl.constexpr, TARGETS: gl.constexpr,
             PERSISTENT: gl.constexpr):  # fmt: skip
    BLOCK_M: gl.constexpr = q_s.type.shape[1]
    ROWS: gl.constexpr = k_s.type.shape[1]
    D: gl.constexpr = k_s.type.shape[2]
    c = 0
    turn = 0
    tile = 0
    edges = 0
    item, row0, n, history, pair = find_item(
        gl.program_id(0), items, items_per_head, offsets, num_targets, counter, H, 4 * ROWS, TARGETS, PERSISTENT
    )
    while item < items:
        head = (item // items_per_head) % H
        col = head * D
        post_item(slot, slot_full, slot_free, turn, head, row0, n, history, pair)
        for half in range(_halves(n, pair, ROWS)):
            n0, count = _key_tile(half, n, pair, ROWS, BLOCK_M)
            # Queries first: they can land while the workers still need the previous K and V.
            edges = _load_queries(0, c, qd, dod, q_s, do_s, q_full, do_full, q_free, do_free, edge, edges, row0, n0, n, col)
            mbarrier.wait(kv_free.index(0), (tile & 1) ^ 1)
            for w in gl.static_range(2):
                row = n0 + w * ROWS
                edges = load_clean(kd, row0 + row, col, k_s.index(w), k_full.index(w), edge, edges, n - row)
                edges = load_clean(vd, row0 + row, col, v_s.index(w), v_full.index(w), edge, edges, n - row)
            for u in range(1, count):
                edges = _load_queries(u, c + u, qd, dod, q_s, do_s, q_full, do_full, q_free, do_free, edge, edges, row0, n0, n, col)
            c += count
            tile += 1
        turn += 1
        item, row0, n, history, pair = find_item(
            after(item, counter, PERSISTENT), items, items_per_head, offsets, num_targets, counter, H, 4 * ROWS, TARGETS, PERSISTENT
        )
    post_item(slot, slot_full, slot_free, turn, -1, 0, 0, 0, 0)


@gluon.jit
def _issue_dq(w: gl.constexpr, c, k_s, ds_s, ds_full):
    """Columns [w * D / 2, (w + 1) * D / 2) of dS K for the tile at ring position c, over the 128 keys of both workers."""
    HALF: gl.constexpr = k_s.type.shape[2] // 2
    BLOCK_M: gl.constexpr = ds_s.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    zero = gl.zeros([BLOCK_M, HALF], gl.float32, layout)
    b = c % 2
    mbarrier.wait(ds_full.index(b), (c // 2) & 1)
    k0 = k_s.index(0).slice(w * HALF, HALF, 1)
    k1 = k_s.index(1).slice(w * HALF, HALF, 1)
    dq = warpgroup_mma(ds_s.index(b * 2).permute((1, 0)), k0, zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds_s.index(b * 2 + 1).permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def _add_dq(w: gl.constexpr, row, dq, dqd, dq_s, col):
    """The previous reduction has read dq_s: its thread waited for that before the last mbarrier.arrive, which joins the warpgroup."""
    HALF: gl.constexpr = dq.type.shape[1]
    dq_s.index(w).store(dq)
    fence_async_shared()
    block_barrier()
    tma_add(dqd, [row, col + w * HALF], dq_s.index(w))


@gluon.jit
def _activate(s, half_alpha, key, query, history, MASK: gl.constexpr, TARGETS: gl.constexpr):
    """silu(2 y) as bf16, and g with silu'(2 y) = (1 + g) / 2, as fp16: two a register while dP is computed."""
    y = s * half_alpha
    if MASK:
        y = gl.where(visible(query[None, :], key[:, None], history, TARGETS), y, -1e4)  # both are exactly 0 there: tanh is -1
    t = tanh(y)
    p = y * t + y
    g = y * (1.0 - t * t) + t
    return p.to(gl.bfloat16), g.to(gl.float16)


@gluon.jit
def _step(w: gl.constexpr, u, c, dk, dv, q_s, do_s, k_s, v_s, ds_s, dq_s, q_full, do_full, q_free, do_free, ds_full, dqd, row0, n0, col,
          history, half_alpha, MASK: gl.constexpr, FUSED: gl.constexpr, FIRST: gl.constexpr, TARGETS: gl.constexpr):  # fmt: skip
    """Query tile u, at ring position c: adds to dK and dV, leaves dS^T in ds_s, and sends off dQ of the tile before."""
    RING: gl.constexpr = q_s.type.shape[0]
    BLOCK_M: gl.constexpr = q_s.type.shape[1]
    D: gl.constexpr = q_s.type.shape[2]
    ROWS: gl.constexpr = k_s.type.shape[1]
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    a_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(0, a_l, k_width=2)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, s_l)
    b = c % RING
    phase = (c // RING) & 1
    key = n0 + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_l))
    query = n0 + u * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_l))
    mbarrier.wait(q_full.index(b), phase)
    if FIRST and w * ROWS >= BLOCK_M:  # every score of this tile is above the diagonal
        mbarrier.wait(do_full.index(b), phase)
        if FUSED:
            ds_s.index((c % 2) * 2 + w).store(zero.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(ds_full.index(c % 2), count=1)
        mbarrier.arrive(do_free.index(b), count=1)
        mbarrier.arrive(q_free.index(b), count=1)
    else:
        s = warpgroup_mma(k_s.index(w), q_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
        if FUSED and not FIRST:  # dQ of the previous tile runs under this tile's activation
            dq = _issue_dq(w, c - 1, k_s, ds_s, ds_full)
            s = warpgroup_mma_wait(2, deps=(s,))
            p, g = _activate(s, half_alpha, key, query, history, MASK, TARGETS)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            _add_dq(w, row0 + n0 + (u - 1) * BLOCK_M, dq, dqd, dq_s, col)
            mbarrier.wait(do_full.index(b), phase)
            dp = warpgroup_mma(v_s.index(w), do_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
        else:
            mbarrier.wait(do_full.index(b), phase)
            dp = warpgroup_mma(v_s.index(w), do_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            p, g = _activate(s, half_alpha, key, query, history, MASK, TARGETS)
        dv = warpgroup_mma(gl.convert_layout(p, p_l, assert_trivial=True), do_s.index(b), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (dp * g.to(gl.float32) + dp).to(gl.bfloat16)
        if FUSED:
            # Buffer c % 2 is free: both workers signalled position c - 1 after they had finished dQ of c - 2.
            ds_s.index((c % 2) * 2 + w).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(c % 2), count=1)
        dk = warpgroup_mma(gl.convert_layout(ds, p_l, assert_trivial=True), q_s.index(b), dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        mbarrier.arrive(do_free.index(b), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        if FUSED and not FIRST:
            tma.store_wait(0)
        mbarrier.arrive(q_free.index(b), count=1)
    return dk, dv


@gluon.jit
def _consume(w: gl.constexpr, dqd, dk_ptr, dv_ptr, stride_dk, stride_dv, half_alpha, scale_k, scale_v, q_s, do_s, k_s, v_s, ds_s, dq_s,
             slot, slot_full, slot_free, k_full, v_full, kv_free, q_full, do_full, q_free, do_free, ds_full, FUSED: gl.constexpr,
             TARGETS: gl.constexpr):  # fmt: skip
    BLOCK_M: gl.constexpr = q_s.type.shape[1]
    D: gl.constexpr = q_s.type.shape[2]
    ROWS: gl.constexpr = k_s.type.shape[1]
    DIAGONAL: gl.constexpr = 2 * ROWS // BLOCK_M  # query tiles that the diagonal crosses
    a_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.bfloat16)
    c = 0
    turn = 0
    tile = 0
    head, row0, n, history, pair = read_item(slot, slot_full, slot_free, turn)
    while head >= 0:
        col = head * D
        for half in range(_halves(n, pair, ROWS)):
            n0, count = _key_tile(half, n, pair, ROWS, BLOCK_M)
            n0, count = uniform(n0), uniform(count)  # 5 fewer spills in the inner loop
            masked = DIAGONAL
            if TARGETS:  # a key tile with targets in it masks all its query tiles
                masked = gl.where(n0 + 2 * ROWS > history, count, DIAGONAL)
            masked = gl.minimum(masked, count)
            dk = gl.zeros([ROWS, D], gl.float32, a_l)
            dv = gl.zeros([ROWS, D], gl.float32, a_l)
            mbarrier.wait(k_full.index(0), tile & 1)
            mbarrier.wait(k_full.index(1), tile & 1)
            mbarrier.wait(v_full.index(w), tile & 1)
            dk, dv = _step(w, 0, c, dk, dv, q_s, do_s, k_s, v_s, ds_s, dq_s, q_full, do_full, q_free, do_free, ds_full, dqd, row0, n0,
                           col, history, half_alpha, True, FUSED, True, TARGETS)  # fmt: skip
            for u in range(1, masked):
                dk, dv = _step(w, u, c + u, dk, dv, q_s, do_s, k_s, v_s, ds_s, dq_s, q_full, do_full, q_free, do_free, ds_full, dqd, row0,
                               n0, col, history, half_alpha, True, FUSED, False, TARGETS)  # fmt: skip
            for u in range(masked, count):
                dk, dv = _step(w, u, c + u, dk, dv, q_s, do_s, k_s, v_s, ds_s, dq_s, q_full, do_full, q_free, do_free, ds_full, dqd, row0,
                               n0, col, history, half_alpha, False, FUSED, False, TARGETS)  # fmt: skip
            c += count
            tile += 1
            if FUSED:
                dq = warpgroup_mma_wait(0, deps=(_issue_dq(w, c - 1, k_s, ds_s, ds_full),))
                mbarrier.arrive(kv_free.index(0), count=1)
                m0 = n0 + (count - 1) * BLOCK_M
                query = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, dq.type.layout))
                dq = gl.where((query < n)[:, None], dq, 0.0)  # the rows after are another sequence's, and K may hold NaN
                _add_dq(w, row0 + m0, dq, dqd, dq_s, col)
                tma.store_wait(0)
            else:
                mbarrier.arrive(kv_free.index(0), count=1)
            staging = dq_s.index(w)._reinterpret(gl.bfloat16, [ROWS, D], rows_l)
            row = n0 + w * ROWS
            put_rows(dk * scale_k, staging, dk_ptr, stride_dk, row0 + row, n - row, col)
            put_rows(dv * scale_v, staging, dv_ptr, stride_dv, row0 + row, n - row, col)
        turn += 1
        head, row0, n, history, pair = read_item(slot, slot_full, slot_free, turn)


@gluon.jit(do_not_specialize=["items", "items_per_head"])
def key_kernel(qd, dod, kd, vd, dqd, dk_ptr, dv_ptr, offsets, num_targets, counter, stride_dk, stride_dv, items, items_per_head,
               half_alpha, scale_k, scale_v, H: gl.constexpr, RING: gl.constexpr, REGISTERS: gl.constexpr, FUSED: gl.constexpr,
               TARGETS: gl.constexpr, PERSISTENT: gl.constexpr):  # fmt: skip
    """dK, dV and, if FUSED, unscaled dQ added to dqd, fp32 [T, H * D]. Launch with 4 warps; see `hopper.attention_backward`."""
    BLOCK_M: gl.constexpr = qd.block_type.shape[0]
    D: gl.constexpr = qd.block_type.shape[1]
    ROWS: gl.constexpr = kd.block_type.shape[0]
    ds_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], gl.bfloat16)
    k_s = gl.allocate_shared_memory(kd.dtype, [2, ROWS, D], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [2, ROWS, D], vd.layout)
    q_s = gl.allocate_shared_memory(qd.dtype, [RING, BLOCK_M, D], qd.layout)
    do_s = gl.allocate_shared_memory(dod.dtype, [RING, BLOCK_M, D], dod.layout)
    ds_s = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, BLOCK_M] if FUSED else [4, 8, BLOCK_M], ds_l)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, D // 2], dqd.layout)
    slot = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slot_full, slot_free = allocate_barriers(1, 1), allocate_barriers(1, 2)  # 2: one arrival per worker
    k_full, v_full, kv_free = allocate_barriers(2, 1), allocate_barriers(2, 1), allocate_barriers(1, 2)
    q_full, do_full = allocate_barriers(RING, 1), allocate_barriers(RING, 1)
    q_free, do_free = allocate_barriers(RING, 2), allocate_barriers(RING, 2)
    ds_full = allocate_barriers(2, 2)
    edge = allocate_barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_produce, (qd, dod, kd, vd, offsets, num_targets, counter, items, items_per_head, q_s, do_s, k_s, v_s, slot, slot_full,
                        slot_free, k_full, v_full, kv_free, q_full, do_full, q_free, do_free, edge, H, TARGETS, PERSISTENT)),
            (_consume, (0, dqd, dk_ptr, dv_ptr, stride_dk, stride_dv, half_alpha, scale_k, scale_v, q_s, do_s, k_s, v_s, ds_s, dq_s,
                        slot, slot_full, slot_free, k_full, v_full, kv_free, q_full, do_full, q_free, do_free, ds_full, FUSED, TARGETS)),
            (_consume, (1, dqd, dk_ptr, dv_ptr, stride_dk, stride_dv, half_alpha, scale_k, scale_v, q_s, do_s, k_s, v_s, ds_s, dq_s,
                        slot, slot_full, slot_free, k_full, v_full, kv_free, q_full, do_full, q_free, do_free, ds_full, FUSED, TARGETS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@triton.jit
def cast_kernel(src, dst, stride, scale, elements, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """dst[row, column] = bf16(scale * src[row, column]); src: fp32 [T, WIDTH], dense."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + i, mask=i < elements)
    tl.store(dst + (i // WIDTH) * stride + i % WIDTH, (x * scale).to(tl.bfloat16), mask=i < elements)
