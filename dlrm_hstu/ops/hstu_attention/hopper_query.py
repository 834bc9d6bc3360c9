"""Gradient of the queries alone, without atomics, for Hopper (sm_90a): the bitwise reproducible choice of HSTU attention's backward.

T tokens, H heads, D head width, n a sequence's length. One block per 128 queries of a (sequence, head); S and dP of key tile j are
computed under the derivative of tile j - 1. As in the forward, tiles wholly below the diagonal carry no mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dlrm_hstu.ops.hstu_attention.hopper_device import allocate_barriers, load_clean, load_tile, put_rows, tanh, visible


@gluon.jit
def _produce(qd, dod, kd, vd, q_s, do_s, k_s, v_s, q_full, k_full, v_full, k_free, v_free, edge, row0, m0, n, col, tiles):
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    ROWS: gl.constexpr = q_s.type.shape[1]
    edges = 0
    for w in gl.static_range(2):
        load_tile(qd, row0 + m0 + w * ROWS, col, q_s.index(w), q_full.index(2 * w))
        load_tile(dod, row0 + m0 + w * ROWS, col, do_s.index(w), q_full.index(2 * w + 1))
    for j in range(tiles):
        b = j % RING
        phase = ((j // RING) & 1) ^ 1  # a fresh barrier passes parity 1
        row = row0 + j * BLOCK_N
        mbarrier.wait(k_free.index(b), phase)
        edges = load_clean(kd, row, col, k_s.index(b), k_full.index(b), edge, edges, n - j * BLOCK_N)
        mbarrier.wait(v_free.index(b), phase)
        load_tile(vd, row, col, v_s.index(b), v_full.index(b))  # what V of rows past the end spoils is masked, by select


@gluon.jit
def _derive(s, dp, half_alpha, query, key, history, MASK: gl.constexpr, TARGETS: gl.constexpr):
    y = s * half_alpha
    t = tanh(y)
    g = y * (1.0 - t * t) + t  # silu'(2 y) = (1 + g) / 2
    ds = dp * g + dp
    if MASK:
        ds = gl.where(visible(query[:, None], key[None, :], history, TARGETS), ds, 0.0)
    return ds.to(gl.bfloat16)


@gluon.jit
def _step(j, s, dp, dq, q, do, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, MASK: gl.constexpr,
          TARGETS: gl.constexpr):  # fmt: skip
    """S and dP of tile j are queued, then dS of tile j - 1 is computed under them and fed to dQ."""
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    ROWS: gl.constexpr = q.type.shape[0]
    s_l: gl.constexpr = s.type.layout
    p_l: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, k_width=2)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_l)
    b = j % RING
    before = (j - 1) % RING
    phase = (j // RING) & 1
    mbarrier.wait(k_full.index(b), phase)
    s_next = warpgroup_mma(q, k_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(b), phase)
    dp_next = warpgroup_mma(do, v_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
    key = (j - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_l))
    ds = gl.convert_layout(_derive(s, dp, half_alpha, query, key, history, MASK, TARGETS), p_l, assert_trivial=True)
    dq = warpgroup_mma(ds, k_s.index(before), dq, is_async=True)
    s_next, dp_next = warpgroup_mma_wait(1, deps=(s_next, dp_next))
    mbarrier.arrive(v_free.index(b), count=1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(k_free.index(before), count=1)
    return s_next, dp_next, dq


@gluon.jit
def _consume(w: gl.constexpr, dq_ptr, stride_dq, half_alpha, scale_q, q_s, do_s, k_s, v_s, q_full, k_full, v_full, k_free, v_free, row0,
             m0, n, history, col, tiles, TARGETS: gl.constexpr):  # fmt: skip
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    D: gl.constexpr = k_s.type.shape[2]
    ROWS: gl.constexpr = q_s.type.shape[1]
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    a_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(0, a_l, k_width=2)
    first = m0 + w * ROWS
    query = first + gl.arange(0, ROWS, gl.SliceLayout(1, s_l))
    q = q_s.index(w)
    do = do_s.index(w)
    dq = gl.zeros([ROWS, D], gl.float32, a_l)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_l)
    count = gl.minimum(tiles, (first + ROWS + BLOCK_N - 1) // BLOCK_N)  # the first 64 queries need fewer keys
    mbarrier.wait(q_full.index(2 * w), 0)
    mbarrier.wait(q_full.index(2 * w + 1), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(0), 0)
    dp = warpgroup_mma(do, v_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    mbarrier.arrive(v_free.index(0), count=1)
    unmasked = gl.minimum(gl.minimum(first, history) // BLOCK_N, count - 1)  # tiles below the diagonal and before the targets
    for j in range(1, unmasked + 1):
        s, dp, dq = _step(j, s, dp, dq, q, do, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, False, TARGETS)
    for j in range(unmasked + 1, count):
        s, dp, dq = _step(j, s, dp, dq, q, do, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, True, TARGETS)
    key = (count - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_l))
    ds = gl.convert_layout(_derive(s, dp, half_alpha, query, key, history, True, TARGETS), p_l, assert_trivial=True)
    dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, k_s.index((count - 1) % RING), dq, is_async=True),))
    put_rows(dq * scale_q, q, dq_ptr, stride_dq, row0 + first, n - first, col)  # q is done with: its memory stages dQ


@gluon.jit(do_not_specialize=["items_per_head"])
def query_kernel(qd, dod, kd, vd, dq_ptr, offsets, num_targets, stride_dq, items_per_head, half_alpha, scale_q, H: gl.constexpr,
                 RING: gl.constexpr, REGISTERS: gl.constexpr, TARGETS: gl.constexpr):  # fmt: skip
    """dQ. items_per_head: 128-query tiles of the longest sequence; grid: B * H times that. Launch with 4 warps."""
    ROWS: gl.constexpr = qd.block_type.shape[0]
    D: gl.constexpr = qd.block_type.shape[1]
    BLOCK_N: gl.constexpr = kd.block_type.shape[0]
    head = gl.program_id(0) // items_per_head
    sequence = head // H
    start = gl.load(offsets + sequence)
    row0 = start.to(gl.int32)
    n = (gl.load(offsets + sequence + 1) - start).to(gl.int32)
    history = n
    if TARGETS:
        history = gl.maximum(n - gl.load(num_targets + sequence).to(gl.int32), 0)
    m0 = (items_per_head - 1 - gl.program_id(0) % items_per_head) * (2 * ROWS)  # longest rows first
    col = (head % H) * D
    if m0 < n:
        q_s = gl.allocate_shared_memory(qd.dtype, [2, ROWS, D], qd.layout)
        do_s = gl.allocate_shared_memory(qd.dtype, [2, ROWS, D], qd.layout)
        k_s = gl.allocate_shared_memory(kd.dtype, [RING, BLOCK_N, D], kd.layout)
        v_s = gl.allocate_shared_memory(vd.dtype, [RING, BLOCK_N, D], vd.layout)
        q_full, edge = allocate_barriers(4, 1), allocate_barriers(1, 1)
        k_full, v_full = allocate_barriers(RING, 1), allocate_barriers(RING, 1)
        k_free, v_free = allocate_barriers(RING, 2), allocate_barriers(RING, 2)  # 2: one arrival per worker
        fence_async_shared()
        tiles = (gl.minimum(m0 + 2 * ROWS, n) + BLOCK_N - 1) // BLOCK_N
        gl.warp_specialize(
            [
                (_produce, (qd, dod, kd, vd, q_s, do_s, k_s, v_s, q_full, k_full, v_full, k_free, v_free, edge, row0, m0, n, col, tiles)),
                (_consume, (0, dq_ptr, stride_dq, half_alpha, scale_q, q_s, do_s, k_s, v_s, q_full, k_full, v_full, k_free, v_free, row0,
                            m0, n, history, col, tiles, TARGETS)),
                (_consume, (1, dq_ptr, stride_dq, half_alpha, scale_q, q_s, do_s, k_s, v_s, q_full, k_full, v_full, k_free, v_free, row0,
                            m0, n, history, col, tiles, TARGETS)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
