"""What the Hopper kernels share: the tile scheduler, clean loads of a sequence's last tile, and small device functions.

One default warpgroup loads by TMA and hands out work; two worker warpgroups compute. A work item is one part of one sequence and head.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Adds a shared tile to global memory. The operation exists in Triton 3.6 and 3.7, but Gluon does not export it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def tanh(y):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def uniform(x):
    """x, the same in all lanes, as the compiler cannot know: it then stays in uniform registers, which spares the vector registers."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def visible(query, key, history, TARGETS: gl.constexpr):
    """bool [queries, keys] or the transpose, as the index vectors broadcast: earlier or equal, and of the targets only oneself."""
    mask = query >= key
    if TARGETS:
        mask = mask & ((key < history) | (query == key))
    return mask


@gluon.jit
def allocate_barriers(N: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def after(item, counter, PERSISTENT: gl.constexpr):
    """The item this block takes next. Items past the first wave are claimed in order from a counter, so long ones do not pile up."""
    if PERSISTENT:
        return gl.atomic_add(counter, 1) + gl.num_programs(0)
    return item + gl.num_programs(0)


@gluon.jit
def find_item(item, items, items_per_head, offsets, num_targets, counter, H: gl.constexpr, ROWS: gl.constexpr, TARGETS: gl.constexpr,
              PERSISTENT: gl.constexpr):  # fmt: skip
    """The first item from `item` on that has rows. An item is ROWS rows, numbered `part`, of one (sequence, head).

    Returns item, first token, length, history length, part; item >= items if there is none.
    """
    row0 = 0
    n = 0
    part = 0
    while (part * ROWS >= n) & (item < items):
        sequence = item // items_per_head // H
        start = gl.load(offsets + sequence)
        row0 = start.to(gl.int32)
        n = (gl.load(offsets + sequence + 1) - start).to(gl.int32)
        part = item % items_per_head
        if part * ROWS >= n:
            item = after(item, counter, PERSISTENT)
    history = n
    if TARGETS:
        if item < items:
            history = gl.maximum(n - gl.load(num_targets + item // items_per_head // H).to(gl.int32), 0)
    return item, row0, n, history, part


@gluon.jit
def post_item(slot, full, free, turn, head, row0, n, history, part):
    """Hands one item to the workers; head -1 ends their loop."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 8, layout)
    x = gl.where(i == 0, head, gl.where(i == 1, row0, gl.where(i == 2, n, gl.where(i == 3, history, part))))
    mbarrier.wait(free.index(0), (turn & 1) ^ 1)  # a fresh barrier passes parity 1
    slot.store(x)
    mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def read_item(slot, full, free, turn):
    """Returns head, first token, length, history length, part."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 8, layout)
    mbarrier.wait(full.index(0), turn & 1)
    x = slot.load(layout)
    head = uniform(gl.sum(gl.where(i == 0, x, 0), 0))
    row0 = uniform(gl.sum(gl.where(i == 1, x, 0), 0))
    n = uniform(gl.sum(gl.where(i == 2, x, 0), 0))
    history = uniform(gl.sum(gl.where(i == 3, x, 0), 0))
    part = uniform(gl.sum(gl.where(i == 4, x, 0), 0))
    mbarrier.arrive(free.index(0), count=1)
    return head, row0, n, history, part


@gluon.jit
def load_tile(desc, row, col, tile, full):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, col], full, tile)


@gluon.jit
def load_clean(desc, row, col, tile, full, edge, edges, rows_left):
    """`load_tile`, but rows from `rows_left` on, which are another sequence's, become zero before `full` is signalled.

    They may hold NaN, and 0 * NaN would pass through a product. `edge`: a barrier of this function; edges: how often it was used.
    """
    ROWS: gl.constexpr = tile.type.shape[0]
    D: gl.constexpr = tile.type.shape[1]
    CHUNK: gl.constexpr = 16  # 8 registers a thread; the loading warpgroup has 24
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    if rows_left >= ROWS:
        load_tile(desc, row, col, tile, full)
    else:
        load_tile(desc, row, col, tile, edge.index(0))
        mbarrier.wait(edge.index(0), edges & 1)
        for first in gl.static_range(0, ROWS, CHUNK):
            if first + CHUNK > rows_left:
                chunk = tile.slice(first, CHUNK, 0)
                r = first + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
                x = chunk.load(layout)
                chunk.store(gl.where((r < rows_left)[:, None], x, gl.zeros([CHUNK, D], x.dtype, layout)))
        fence_async_shared()
        mbarrier.arrive(full, count=1)
        edges += 1
    return edges


@gluon.jit
def put_rows(x, staging, ptr, stride, row, n, col):
    """x, an accumulator of one warpgroup, to bf16 rows [row, row + n) and columns from col; through shared memory, 16 bytes a thread."""
    R: gl.constexpr = staging.type.shape[0]
    D: gl.constexpr = staging.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    block_barrier()
    staging.store(x.to(gl.bfloat16))
    block_barrier()
    r = gl.arange(0, R, gl.SliceLayout(1, layout))
    d = col + gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(ptr + (row + r)[:, None].to(gl.int64) * stride + d[None, :], staging.load(layout), mask=(r < n)[:, None])
