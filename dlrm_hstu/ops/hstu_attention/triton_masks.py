"""Which tiles of keys and queries the attention masks leave, and the mask within a tile: device functions.

rank, history: see `hstu_mask` in reference.py. Ranks never fall from one token to the next, so the runs are exact: a tile in a run has a
visible pair, a tile outside has none. A tile inside has visible pairs only; contextual queries count as boundary where they are few.
"""

import triton
import triton.language as tl

TARGETS, CONTEXTUAL, WINDOW, MIN_FULL = (tl.constexpr(bit) for bit in (1, 2, 4, 8))  # bits of the kernels' MASKS


def mask_bits(targets: bool, contextual: bool, window: bool, min_full: bool) -> int:
    return targets * TARGETS.value | contextual * CONTEXTUAL.value | window * WINDOW.value | min_full * MIN_FULL.value


@triton.jit
def sequence_of(offsets, num_targets, contextual, b, MASKS: tl.constexpr):
    """(first token, length, history, prefix): after `prefix` tokens of rank 0, ranks grow by one to `history`, the targets' rank."""
    start = tl.load(offsets + b).to(tl.int64)
    length = (tl.load(offsets + b + 1) - start).to(tl.int32)
    prefix = 0
    if CONTEXTUAL & MASKS:
        prefix = contextual - 1
    history = length - prefix
    if TARGETS & MASKS:
        history -= tl.load(num_targets + b).to(tl.int32)
    return start, length, history, prefix


@triton.jit
def rank_of(place, history, prefix, MASKS: tl.constexpr):
    if CONTEXTUAL & MASKS:
        place = tl.maximum(place - prefix, 0)
    if TARGETS & MASKS:
        place = tl.minimum(place, history)
    return place


@triton.jit
def first_place(rank, prefix):
    """The first place of a rank."""
    return tl.where(rank > 0, rank + prefix, 0)


@triton.jit
def is_visible(query, key, history, prefix, window, min_full, MASKS: tl.constexpr):
    """The mask of places that broadcast. No query before its end sees a key past the end; queries past the end are zeros."""
    query_rank, key_rank = rank_of(query, history, prefix, MASKS), rank_of(key, history, prefix, MASKS)
    visible = query_rank > key_rank
    if WINDOW & MASKS:
        near = query_rank - key_rank <= window
        if MIN_FULL & MASKS:
            near = near | (query_rank >= history - min_full)
        visible = visible & near
    visible = visible | (query == key)
    if CONTEXTUAL & MASKS:
        visible = visible | ((query_rank == 0) & (key_rank < history))
    return visible


@triton.jit
def keys_of(begin, end, history, prefix, window, min_full, BLOCK_KEY: tl.constexpr, MASKS: tl.constexpr):
    """The key tiles of the queries [begin, end): (first, inside, inside_end, last, diagonal, stop).

    Seen are [first, last) and [diagonal, stop); [inside, inside_end), a part of the first run, is seen whole by every query.
    """
    oldest, newest = rank_of(begin, history, prefix, MASKS), rank_of(end - 1, history, prefix, MASKS)
    some, some_end = 0, first_place(newest, prefix)
    whole, whole_end = 0, first_place(oldest, prefix)
    if WINDOW & MASKS:
        some, whole = first_place(oldest - window, prefix), first_place(newest - window, prefix)
        if MIN_FULL & MASKS:
            unlimited = history - min_full
            some = tl.where(newest >= unlimited, 0, some)
            whole = tl.where(oldest >= unlimited, 0, first_place(tl.minimum(newest, unlimited - 1) - window, prefix))
    if CONTEXTUAL & MASKS:
        opens = (begin <= prefix) & (history > 0)  # a query of rank 0 sees all history
        some, some_end = tl.where(opens, 0, some), tl.where(opens, history + prefix, some_end)
        whole, whole_end = tl.where(opens, 0, whole), tl.where(opens, tl.where(end - 1 <= prefix, history + prefix, 0), whole_end)
    first, last = some // BLOCK_KEY, tl.cdiv(some_end, BLOCK_KEY)
    inside, inside_end = tl.cdiv(whole, BLOCK_KEY), whole_end // BLOCK_KEY
    nothing = inside >= inside_end
    inside, inside_end = tl.where(nothing, first, inside), tl.where(nothing, first, inside_end)
    return first, inside, inside_end, last, tl.maximum(begin // BLOCK_KEY, last), tl.maximum(tl.cdiv(end, BLOCK_KEY), last)


@triton.jit
def queries_of(begin, end, length, history, prefix, window, min_full, BLOCK_QUERY: tl.constexpr, MASKS: tl.constexpr):
    """The query tiles of the keys [begin, end): (start, opening_end, first, inside, inside_end, last, rest, full, full_end, stop).

    Seen are [start, opening_end), the contextual block; [first, last); and [rest, stop), queries with an unlimited window.
    Every query of the tiles [inside, inside_end) and [full, full_end) sees all the keys.
    """
    oldest, newest = rank_of(begin, history, prefix, MASKS), rank_of(end - 1, history, prefix, MASKS)
    any_history, all_history = oldest < history, newest < history  # only its own row sees a target
    some_end = tl.where(any_history, length, end)
    whole, whole_end = tl.where(all_history, first_place(newest + 1, prefix), length), length
    if WINDOW & MASKS:
        some_end = tl.where(any_history & (newest + window < history), first_place(newest + window + 1, prefix), some_end)
        whole_end = tl.where(oldest + window < history, first_place(oldest + window + 1, prefix), length)
    first, last = begin // BLOCK_QUERY, tl.cdiv(some_end, BLOCK_QUERY)
    inside, inside_end = tl.cdiv(whole, BLOCK_QUERY), whole_end // BLOCK_QUERY
    nothing = inside >= inside_end
    inside, inside_end = tl.where(nothing, first, inside), tl.where(nothing, first, inside_end)
    start, opening_end = first, first
    if CONTEXTUAL & MASKS:
        start = tl.where(any_history, 0, first)
        opening_end = tl.where(any_history, tl.minimum(tl.cdiv(prefix + 1, BLOCK_QUERY), first), first)
    rest, full, full_end, stop = last, last, last, last
    if MIN_FULL & MASKS:
        unlimited = first_place(history - min_full, prefix)
        stop = tl.where(any_history, tl.cdiv(length, BLOCK_QUERY), last)
        rest = tl.where(any_history, tl.maximum(unlimited // BLOCK_QUERY, last), last)
        full = tl.maximum(tl.cdiv(tl.maximum(unlimited, whole), BLOCK_QUERY), inside_end)
        full_end = tl.maximum(length // BLOCK_QUERY, full)
    return start, opening_end, first, inside, inside_end, last, rest, full, full_end, stop


@triton.jit
def hop(tile, gap, gap_end):
    """Tiles from `gap` on move past `gap_end`."""
    return tl.where(tile >= gap, tile + (gap_end - gap), tile)
