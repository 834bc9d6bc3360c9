"""HSTU attention forward for Hopper (sm_90a): one loading and two computing warpgroups of 64 queries each.

T tokens, H heads, D head width, n a sequence's length. A work item is 128 queries of one (sequence, head); blocks stay on their
multiprocessor and load the next item's first tiles while the last one finishes. There is no softmax, so O = sum_j silu(S_j) V_j needs
no rescaling: S of key tile j is computed under the activation of tile j - 1. Tiles wholly below the diagonal carry no mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dlrm_hstu.ops.hstu_attention.hopper_device import (
    after,
    allocate_barriers,
    find_item,
    load_clean,
    load_tile,
    post_item,
    put_rows,
    read_item,
    tanh,
    visible,
)


@gluon.jit
def _load_kv(j, c, kd, vd, k_s, v_s, k_full, v_full, k_free, v_free, edge, edges, row0, n, col):
    """Key tile j of a sequence into ring position c. Keys past the end need no zeros: their scores are masked, by select."""
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    b = c % RING
    phase = ((c // RING) & 1) ^ 1  # a fresh barrier passes parity 1
    mbarrier.wait(k_free.index(b), phase)
    load_tile(kd, row0 + j * BLOCK_N, col, k_s.index(b), k_full.index(b))
    mbarrier.wait(v_free.index(b), phase)
    return load_clean(vd, row0 + j * BLOCK_N, col, v_s.index(b), v_full.index(b), edge, edges, n - j * BLOCK_N)


@gluon.jit
def _produce(qd, kd, vd, offsets, num_targets, counter, items, items_per_head, q_s, k_s, v_s, slot, slot_full, slot_free, q_full, q_free,
             k_full, v_full, k_free, v_free, edge, H: gl.constexpr, TARGETS: gl.constexpr, PERSISTENT: gl.constexpr):  # fmt: skip
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    ROWS: gl.constexpr = q_s.type.shape[1]
    D: gl.constexpr = q_s.type.shape[2]
    c = 0
    turn = 0
    edges = 0
    item, row0, n, history, part = find_item(
        gl.program_id(0), items, items_per_head, offsets, num_targets, counter, H, 2 * ROWS, TARGETS, PERSISTENT
    )
    while item < items:
        head = (item // items_per_head) % H
        m0 = ((n + 2 * ROWS - 1) // (2 * ROWS) - 1 - part) * (2 * ROWS)  # longest rows first
        col = head * D
        tiles = (gl.minimum(m0 + 2 * ROWS, n) + BLOCK_N - 1) // BLOCK_N
        post_item(slot, slot_full, slot_free, turn, head, row0, n, history, part)
        for w in gl.static_range(2):
            mbarrier.wait(q_free.index(w), (turn & 1) ^ 1)
            load_tile(qd, row0 + m0 + w * ROWS, col, q_s.index(w), q_full.index(w))
        edges = _load_kv(0, c, kd, vd, k_s, v_s, k_full, v_full, k_free, v_free, edge, edges, row0, n, col)
        # The next item is looked up here, where the workers still have tiles to compute.
        next_item, next_row0, next_n, next_history, next_part = find_item(
            after(item, counter, PERSISTENT), items, items_per_head, offsets, num_targets, counter, H, 2 * ROWS, TARGETS, PERSISTENT
        )
        for j in range(1, tiles):
            edges = _load_kv(j, c + j, kd, vd, k_s, v_s, k_full, v_full, k_free, v_free, edge, edges, row0, n, col)
        c += tiles
        turn += 1
        item = next_item
        row0 = next_row0
        n = next_n
        history = next_history
        part = next_part
    post_item(slot, slot_full, slot_free, turn, -1, 0, 0, 0, 0)


@gluon.jit
def _activate(s, half_alpha, query, key, history, MASK: gl.constexpr, TARGETS: gl.constexpr):
    y = s * half_alpha
    p = y * tanh(y) + y  # silu(2 y)
    if MASK:
        p = gl.where(visible(query[:, None], key[None, :], history, TARGETS), p, 0.0)
    return p.to(gl.bfloat16)


@gluon.jit
def _issue_scores(c, q, k_s, k_full):
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    ROWS: gl.constexpr = q.type.shape[0]
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mbarrier.wait(k_full.index(c % RING), (c // RING) & 1)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_l)
    return warpgroup_mma(q, k_s.index(c % RING).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(c, p, o, v_s, v_full):
    RING: gl.constexpr = v_s.type.shape[0]
    p_l: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, k_width=2)
    mbarrier.wait(v_full.index(c % RING), (c // RING) & 1)
    return warpgroup_mma(gl.convert_layout(p, p_l, assert_trivial=True), v_s.index(c % RING), o, is_async=True)


@gluon.jit
def _step(j, c, s, o, q, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, MASK: gl.constexpr, TARGETS: gl.constexpr):
    """Scores of tile j, ring position c, under the activation of tile j - 1, whose scores are s. Returns the new scores and o."""
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    s_next = _issue_scores(c, q, k_s, k_full)
    key = (j - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    o = _issue_output(c - 1, _activate(s, half_alpha, query, key, history, MASK, TARGETS), o, v_s, v_full)
    s_next = warpgroup_mma_wait(1, deps=(s_next,))
    mbarrier.arrive(k_free.index(c % RING), count=1)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(v_free.index((c - 1) % RING), count=1)
    return s_next, o


@gluon.jit
def _consume(w: gl.constexpr, o_ptr, stride_o, half_alpha, inv_n, q_s, k_s, v_s, o_s, slot, slot_full, slot_free, q_full, q_free, k_full,
             v_full, k_free, v_free, TARGETS: gl.constexpr, UNROLL: gl.constexpr):  # fmt: skip
    RING: gl.constexpr = k_s.type.shape[0]
    BLOCK_N: gl.constexpr = k_s.type.shape[1]
    D: gl.constexpr = k_s.type.shape[2]
    ROWS: gl.constexpr = q_s.type.shape[1]
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q = q_s.index(w)
    c = 0
    turn = 0
    head, row0, n, history, part = read_item(slot, slot_full, slot_free, turn)
    while head >= 0:
        m0 = ((n + 2 * ROWS - 1) // (2 * ROWS) - 1 - part) * (2 * ROWS)
        tiles = (gl.minimum(m0 + 2 * ROWS, n) + BLOCK_N - 1) // BLOCK_N
        query = m0 + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_l))
        unmasked = gl.minimum(m0 + w * ROWS, history) // BLOCK_N  # tiles below the diagonal and, for targets, before the targets
        unmasked = gl.minimum(unmasked, tiles - 1)
        mbarrier.wait(q_full.index(w), turn & 1)
        s = warpgroup_mma_wait(0, deps=(_issue_scores(c, q, k_s, k_full),))
        mbarrier.arrive(k_free.index(c % RING), count=1)
        o = gl.zeros([ROWS, D], gl.float32, o_l)
        first = 1
        if UNROLL:  # two tiles an iteration: the scores stay in place, 64 register moves less a tile
            for i in range(unmasked // 2):
                j = 1 + 2 * i
                s_odd, o = _step(j, c + j, s, o, q, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, False, TARGETS)
                s, o = _step(j + 1, c + j + 1, s_odd, o, q, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, False,
                             TARGETS)  # fmt: skip
            first = 1 + unmasked // 2 * 2
        for j in range(first, unmasked + 1):
            s, o = _step(j, c + j, s, o, q, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, False, TARGETS)
        for j in range(unmasked + 1, tiles):
            s, o = _step(j, c + j, s, o, q, k_s, v_s, k_full, v_full, k_free, v_free, half_alpha, query, history, True, TARGETS)
        mbarrier.arrive(q_free.index(w), count=1)
        c += tiles
        key = (tiles - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_l))
        o = _issue_output(c - 1, _activate(s, half_alpha, query, key, history, True, TARGETS), o, v_s, v_full)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(v_free.index((c - 1) % RING), count=1)
        put_rows(o * inv_n, o_s.index(w), o_ptr, stride_o, row0 + m0 + w * ROWS, n - m0 - w * ROWS, head * D)
        turn += 1
        head, row0, n, history, part = read_item(slot, slot_full, slot_free, turn)


@gluon.jit(do_not_specialize=["items", "items_per_head"])
def forward_kernel(qd, kd, vd, o_ptr, offsets, num_targets, counter, stride_o, items, items_per_head, half_alpha, inv_n, H: gl.constexpr,
                   RING: gl.constexpr, REGISTERS: gl.constexpr, TARGETS: gl.constexpr, PERSISTENT: gl.constexpr,
                   UNROLL: gl.constexpr):  # fmt: skip
    """qd: descriptor of [T, H * D] in tiles of 64 rows; kd, vd: of BLOCK_N rows. Launch with 4 warps; see `hopper.attention_forward`."""
    ROWS: gl.constexpr = qd.block_type.shape[0]
    D: gl.constexpr = qd.block_type.shape[1]
    BLOCK_N: gl.constexpr = kd.block_type.shape[0]
    q_s = gl.allocate_shared_memory(qd.dtype, [2, ROWS, D], qd.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [RING, BLOCK_N, D], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [RING, BLOCK_N, D], vd.layout)
    o_s = gl.allocate_shared_memory(qd.dtype, [2, ROWS, D], qd.layout)
    slot = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slot_full, slot_free = allocate_barriers(1, 1), allocate_barriers(1, 2)  # 2: one arrival per worker
    q_full, q_free = allocate_barriers(2, 1), allocate_barriers(2, 1)
    k_full, v_full = allocate_barriers(RING, 1), allocate_barriers(RING, 1)
    k_free, v_free = allocate_barriers(RING, 2), allocate_barriers(RING, 2)
    edge = allocate_barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_produce, (qd, kd, vd, offsets, num_targets, counter, items, items_per_head, q_s, k_s, v_s, slot, slot_full, slot_free,
                        q_full, q_free, k_full, v_full, k_free, v_free, edge, H, TARGETS, PERSISTENT)),
            (_consume, (0, o_ptr, stride_o, half_alpha, inv_n, q_s, k_s, v_s, o_s, slot, slot_full, slot_free, q_full, q_free, k_full,
                        v_full, k_free, v_free, TARGETS, UNROLL)),
            (_consume, (1, o_ptr, stride_o, half_alpha, inv_n, q_s, k_s, v_s, o_s, slot, slot_full, slot_free, q_full, q_free, k_full,
                        v_full, k_free, v_free, TARGETS, UNROLL)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
