"""The portable Triton attention kernels: on a GPU where there is one, else in Triton's interpreter."""

import inspect
import os

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from dlrm_hstu.ops.hstu_attention import triton as kernels  # noqa: E402
from dlrm_hstu.ops.hstu_attention import triton_masks  # noqa: E402
from dlrm_hstu.ops.hstu_attention.reference import hstu_mask  # noqa: E402
from tests.batches import relative_error  # noqa: E402

TOLERANCE = 1e-5  # relative to the tensor's own scale, fp32
HEADS = 2
UGLY = [0, 1, 31, 0, 32, 33, 0]  # in tiles of 16 and 32
MASKS = {
    "causal": {},
    "contextual": {"contextual_seq_len": 5},
    "contextual of two tiles": {"contextual_seq_len": 20},
    "window": {"max_attn_len": 9},
    "window of one": {"max_attn_len": 1},
    "min full": {"max_attn_len": 4, "min_full_attn_seq_len": 11},
    "all": {"contextual_seq_len": 3, "max_attn_len": 12, "min_full_attn_seq_len": 6},
}
TARGETS = {None: None, "one": [0, 1, 1, 0, 1, 1, 0], "some": [0, 0, 7, 0, 20, 1, 0], "all": UGLY}


def offsets_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64, device=DEVICE)


def wide_views(tokens: int, widths, dtype=torch.float32, heads=HEADS, scale=1.0, extra_rows=3):
    """Slices [tokens, heads, width] of one wide buffer that is NaN everywhere else, and the buffer."""
    row = sum(widths) * heads + 8
    buffer = torch.full((tokens + extra_rows, row), torch.nan, dtype=dtype, device=DEVICE)
    views, column = [], 8
    for width in widths:
        view = buffer[:tokens, column : column + heads * width].unflatten(1, (heads, width))
        view.copy_(scale * torch.randn(view.shape))
        views.append(view)
        column += heads * width
    return buffer, views


def oracle(q, k, v, dout, lengths, num_targets=None, *, max_seq_len, alpha, compute=torch.float64, **mask) -> dict[str, torch.Tensor]:
    """Forward and gradients sequence by sequence, in `compute`."""
    q, k, v = (tensor.detach().to(compute).requires_grad_() for tensor in (q, k, v))
    outs, end = [], 0
    for b, length in enumerate(lengths):
        rows, end = slice(end, end + length), end + length
        targets = None if num_targets is None else torch.as_tensor(num_targets[b : b + 1], device=q.device)
        visible = hstu_mask(torch.tensor([length], device=q.device), length, targets, *mask_settings(mask))[0]
        scores = torch.einsum("nhd,mhd->hnm", q[rows], k[rows]) * alpha
        outs.append(torch.einsum("hnm,mhd->nhd", (silu(scores) / max_seq_len).masked_fill(~visible, 0), v[rows]))
    out = torch.cat(outs)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(compute))), strict=True))


def mask_settings(mask: dict) -> tuple[int, ...]:
    return tuple(mask.get(name, 0) for name in ("contextual_seq_len", "max_attn_len", "min_full_attn_seq_len"))


def run(q, k, v, dout, lengths, num_targets=None, *, longest=None, **settings) -> dict[str, torch.Tensor]:
    """The kernels, into views of NaN buffers; what they do not own stays NaN."""
    offsets, longest = offsets_of(lengths), max(lengths, default=0) if longest is None else longest
    targets = None if num_targets is None else torch.as_tensor(num_targets, device=DEVICE)
    settings |= {"num_targets": targets, "longest": longest}
    buffer, (out, dq, dk, dv) = wide_views(q.shape[0], [v.shape[2], q.shape[2], q.shape[2], v.shape[2]], q.dtype, q.shape[1], torch.nan)
    assert kernels.attention_forward(q, k, v, offsets, out=out, **settings) is out
    gradients = kernels.attention_backward(dout, q, k, v, offsets, dq=dq, dk=dk, dv=dv, **settings)
    assert all(got is given for got, given in zip(gradients, (dq, dk, dv), strict=True))
    assert buffer[:, :8].isnan().all() and buffer[q.shape[0] :].isnan().all(), "written outside the views"
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def random_inputs(lengths, qk_dim=8, v_dim=12, dtype=torch.float32, heads=HEADS):
    """q, k, v as strided views, dout; scores deviate by about 9, past SiLU's curved part."""
    _, (q, k, v) = wide_views(sum(lengths), [qk_dim, qk_dim, v_dim], dtype, heads, scale=1.7)
    return q, k, v, torch.randn(v.shape).to(v)


def errors(actual, expected) -> dict[str, float]:
    return {name: relative_error(actual[name].double().cpu(), expected[name].double().cpu()) for name in expected}


@pytest.fixture
def tiles(monkeypatch):
    """Sets the tile sizes of all kernels; small ones make short sequences span many tiles."""

    def set_tiles(query: int, key: int, warps: int = 4, stages: int = 1) -> None:
        monkeypatch.setattr(kernels, "pinned_tiles", lambda *_: kernels.Tiles(query, key, warps, stages))

    set_tiles(16, 16)
    return set_tiles


@triton.jit(do_not_specialize=["length", "history", "prefix", "window", "min_full"])
def _runs_kernel(runs, length, history, prefix, window, min_full, BLOCK_QUERY: tl.constexpr, BLOCK_KEY: tl.constexpr, MASKS: tl.constexpr):
    """Per query tile the 6 bounds of `keys_of`, per key tile the 10 of `queries_of`, in rows of 16."""
    tile = tl.program_id(0)
    row = runs + 16 * tile
    begin = tile * BLOCK_QUERY
    if begin < length:
        end = tl.minimum(begin + BLOCK_QUERY, length)
        first, inside, inside_end, last, diagonal, stop = triton_masks.keys_of(
            begin, end, history, prefix, window, min_full, BLOCK_KEY, MASKS
        )
        tl.store(row, first)
        tl.store(row + 1, inside)
        tl.store(row + 2, inside_end)
        tl.store(row + 3, last)
        tl.store(row + 4, diagonal)
        tl.store(row + 5, stop)
    begin = tile * BLOCK_KEY
    if begin < length:
        end = tl.minimum(begin + BLOCK_KEY, length)
        start, opening_end, first, inside, inside_end, last, rest, full, full_end, stop = triton_masks.queries_of(
            begin, end, length, history, prefix, window, min_full, BLOCK_QUERY, MASKS
        )
        tl.store(row + 6, start)
        tl.store(row + 7, opening_end)
        tl.store(row + 8, first)
        tl.store(row + 9, inside)
        tl.store(row + 10, inside_end)
        tl.store(row + 11, last)
        tl.store(row + 12, rest)
        tl.store(row + 13, full)
        tl.store(row + 14, full_end)
        tl.store(row + 15, stop)


def runs_of(length, targets, contextual, window, min_full, block_query, block_key):
    """(visited, inside) of the query tiles, then of the key tiles: each a list of pairs of sets."""
    count = max(triton.cdiv(length, block_query), triton.cdiv(length, block_key))
    runs = torch.zeros(count, 16, dtype=torch.int32, device=DEVICE)
    prefix = max(contextual - 1, 0)
    bits = triton_masks.mask_bits(targets is not None, contextual > 0, window > 0, window > 0 and min_full > 0)
    _runs_kernel[(count,)](
        runs, length, length - prefix - (targets or 0), prefix, window, min_full, BLOCK_QUERY=block_query, BLOCK_KEY=block_key, MASKS=bits
    )
    by_query, by_key = [], []
    for row in runs.tolist()[: triton.cdiv(length, block_query)]:
        first, inside, inside_end, last, diagonal, stop = row[:6]
        by_query.append(({*range(first, last), *range(diagonal, stop)}, {*range(inside, inside_end)}))
    for row in runs.tolist()[: triton.cdiv(length, block_key)]:
        start, opening_end, first, inside, inside_end, last, rest, full, full_end, stop = row[6:]
        by_key.append(
            (
                {*range(start, opening_end), *range(first, last), *range(rest, stop)},
                {*range(inside, inside_end), *range(full, full_end)},
            )
        )
    return by_query, by_key


@pytest.mark.parametrize("seed", range(60))
def test_visited_tiles_are_exactly_those_with_a_visible_pair(seed):
    """And the mask-free ones are those that hold visible pairs only (fewer where a tile mixes contextual and other queries)."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 150))
    targets = None if seed % 4 == 0 else int(rng.integers(0, rng.choice([2, 50])) % (length + 1))
    contextual = int(rng.choice([1, 3, 17, 40])) if seed % 2 else 0
    window = int(rng.choice([1, 7, 30, 80])) if seed % 3 else 0
    min_full = int(rng.choice([0, 5, 60])) if window else 0
    block_query, block_key = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    mask = hstu_mask(torch.tensor([length]), length, None if targets is None else torch.tensor([targets]), contextual, window, min_full)[
        0
    ].numpy()
    by_query, by_key = runs_of(length, targets, contextual, window, min_full, block_query, block_key)
    for tile_rows, sizes, cut in ((by_query, (block_query, block_key), mask), (by_key, (block_key, block_query), mask.T)):
        for own, (visited, inside) in enumerate(tile_rows):
            rows = cut[own * sizes[0] : (own + 1) * sizes[0]]
            tiles = [rows[:, begin : begin + sizes[1]] for begin in range(0, length, sizes[1])]
            assert visited == {other for other, tile in enumerate(tiles) if tile.any()}, own
            whole = {other for other, tile in enumerate(tiles) if tile.all() and tile.shape[1] == sizes[1]}
            assert inside == whole or (contextual and inside < whole), own


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_on_ugly_lengths(mask, targets, tiles):
    tiles(*{"one": (32, 16), "some": (16, 32)}.get(targets, (16, 16)))
    inputs, settings = random_inputs(UGLY), {"max_seq_len": 70, "alpha": 0.35, **MASKS[mask]}
    actual, expected = run(*inputs, UGLY, TARGETS[targets], **settings), oracle(*inputs, UGLY, TARGETS[targets], **settings)
    assert max(errors(actual, expected).values()) < TOLERANCE, errors(actual, expected)


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (64, 64)])
def test_lengths_around_64(size, tiles):
    tiles(*size)
    lengths, num_targets, settings = [63, 0, 64, 65], [1, 0, 3, 1], {"max_seq_len": 65, "alpha": 0.35}
    inputs = random_inputs(lengths)
    actual, expected = run(*inputs, lengths, num_targets, **settings), oracle(*inputs, lengths, num_targets, **settings)
    assert max(errors(actual, expected).values()) < TOLERANCE, errors(actual, expected)


@pytest.mark.parametrize("qk_dim, v_dim", [(16, 16), (8, 40), (24, 8), (33, 16)])
def test_widths_that_are_no_powers_of_two(qk_dim, v_dim, tiles):
    inputs, settings = random_inputs([17, 3], qk_dim, v_dim), {"max_seq_len": 17, "alpha": 0.3}
    assert max(errors(run(*inputs, [17, 3], **settings), oracle(*inputs, [17, 3], **settings)).values()) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_batch_of_one(length, tiles):
    inputs, settings = random_inputs([length]), {"max_seq_len": length, "alpha": 0.3}
    assert max(errors(run(*inputs, [length], [1], **settings), oracle(*inputs, [length], [1], **settings)).values()) < TOLERANCE


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_at_all(lengths):
    actual = run(*random_inputs(lengths), lengths, [0] * len(lengths), max_seq_len=8, alpha=1.0)
    assert {name: tuple(value.shape) for name, value in actual.items()} == {
        "out": (0, HEADS, 12),
        "dq": (0, HEADS, 8),
        "dk": (0, HEADS, 8),
        "dv": (0, HEADS, 12),
    }


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_poison_in_one_sequence_stays_there(bad, poison, tiles):
    """Neighbours share tiles of 16 rows: a load past a sequence's end, masked by a product with zero, would spread it."""
    lengths, settings = [5, 19, 3], {"max_seq_len": 19, "alpha": 0.35}
    inputs = random_inputs(lengths)
    clean = run(*inputs, lengths, [1, 1, 1], **settings)
    rows = torch.zeros(sum(lengths), dtype=torch.bool)
    rows[sum(lengths[:bad]) : sum(lengths[: bad + 1])] = True
    for tensor in inputs:
        tensor[rows] = poison
    for name, value in run(*inputs, lengths, [1, 1, 1], **settings).items():
        assert value[rows].isnan().any(), name
        assert torch.equal(value[~rows], clean[name][~rows]), name


def test_one_wide_buffer_holds_inputs_and_one_their_gradients(tiles):
    """The layer's case: q, k, v are slices of [T, 2048], as their gradients; a kernel that assumes row stride H * d reads a neighbour."""
    lengths, settings = [20, 9], {"max_seq_len": 20, "alpha": 0.35}
    inputs = random_inputs(lengths)
    actual, contiguous = run(*inputs, lengths, **settings), run(*(tensor.contiguous() for tensor in inputs), lengths, **settings)
    assert all(torch.equal(actual[name], contiguous[name]) for name in actual)


def test_allocates_where_no_output_is_given(tiles):
    q, k, v, dout = random_inputs([9])
    settings = {"max_seq_len": 9, "alpha": 0.35}
    given, fresh = run(q, k, v, dout, [9], **settings), {"longest": 9, **settings}
    assert torch.equal(kernels.attention_forward(q, k, v, offsets_of([9]), **fresh), given["out"])
    for name, gradient in zip(("dq", "dk", "dv"), kernels.attention_backward(dout, q, k, v, offsets_of([9]), **fresh), strict=True):
        assert gradient.is_contiguous() and torch.equal(gradient, given[name])


def test_longest_is_only_a_bound(tiles):
    inputs, settings = random_inputs([18, 5]), {"max_seq_len": 18, "alpha": 0.35}
    exact, loose = run(*inputs, [18, 5], **settings), run(*inputs, [18, 5], longest=100, **settings)
    assert all(torch.equal(exact[name], loose[name]) for name in exact)


def test_max_seq_len_and_alpha_scale(tiles):
    inputs = random_inputs([21])
    for settings in ({"max_seq_len": 21, "alpha": 0.1}, {"max_seq_len": 4096, "alpha": 1.0}):
        assert max(errors(run(*inputs, [21], **settings), oracle(*inputs, [21], **settings)).values()) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs(dtype, tiles):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 bit patterns")
    assert_near_as_plain_pytorch(random_inputs([40, 17], dtype=dtype), [40, 17], [1, 1], max_seq_len=40, alpha=0.2)


def assert_near_as_plain_pytorch(inputs, lengths, num_targets, **settings) -> None:
    """At most twice the error of PyTorch in the inputs' dtype, five times for gradients."""
    actual, exact = run(*inputs, lengths, num_targets, **settings), oracle(*inputs, lengths, num_targets, **settings)
    plain = errors(oracle(*inputs, lengths, num_targets, compute=inputs[0].dtype, **settings), exact)
    for name, error in errors(actual, exact).items():
        assert error <= (2 if name == "out" else 5) * plain[name], (name, error, plain[name])


@pytest.mark.parametrize("name", ["_forward_kernel", "_dkdv_kernel", "_dq_kernel"])
def test_no_compile_time_constant_from_a_batch(name):
    """A length, an offset or a scale as tl.constexpr would compile anew at every step."""
    parameters = inspect.signature(getattr(kernels, name).fn).parameters
    constants = {key for key, parameter in parameters.items() if parameter.annotation is not inspect.Parameter.empty}
    assert constants == {"H", "D_QK", "D_V", "BLOCK_QK", "BLOCK_V", "BLOCK_QUERY", "BLOCK_KEY", "MASKS", "FAST_TANH"}
    assert {"tiles", "contextual", "window", "min_full"} <= set(kernels._RUNTIME) <= set(parameters)


def test_a_wrong_input_raises():
    q, k, v, dout = random_inputs([4])
    settings = {"max_seq_len": 4, "alpha": 1.0, "longest": 4}
    with pytest.raises(ValueError, match="k has last stride 2, 1 is needed; call contiguous"):
        kernels.attention_forward(q, torch.zeros(4, HEADS, 16, device=DEVICE)[..., ::2], v, offsets_of([4]), **settings)
    with pytest.raises(ValueError, match="v is torch.float16 and q torch.float32; all must be one of"):
        kernels.attention_forward(q, k, v.half(), offsets_of([4]), **settings)
    with pytest.raises(ValueError, match="v has head width 257; 1 to 256"):
        kernels.attention_forward(q, k, torch.zeros(4, HEADS, 257, device=DEVICE), offsets_of([4]), **settings)
    with pytest.raises(ValueError, match="dout has last stride 0"):
        kernels.attention_backward(torch.ones((), device=DEVICE).expand_as(dout), q, k, v, offsets_of([4]), **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("qk_dim, v_dim", [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (40, 200)])
def test_pinned_tiles(qk_dim, v_dim, dtype):
    lengths, num_targets = [0, 1, 63, 64, 65, 333, 700], [0, 1, 1, 1, 1, 1, 30]
    for mask in MASKS.values():
        inputs, settings = random_inputs(lengths, qk_dim, v_dim, dtype), {"max_seq_len": 700, "alpha": qk_dim**-0.5, **mask}
        if dtype == torch.float32:
            assert (
                max(errors(run(*inputs, lengths, num_targets, **settings), oracle(*inputs, lengths, num_targets, **settings)).values())
                < 1e-5
            )
        else:
            assert_near_as_plain_pytorch(inputs, lengths, num_targets, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted({kernel_tiles for key, kernel_tiles in kernels.TILES.items() if key[0] == "default"}))
def test_default_tiles(kind, tiles):
    tiles(*kind)
    assert_near_as_plain_pytorch(
        random_inputs([200, 77], 64, 64, torch.bfloat16), [200, 77], [1, 5], max_seq_len=200, alpha=0.125, contextual_seq_len=8
    )


@pytest.mark.gpu
def test_longest_history():
    inputs = random_inputs([4095, 1], 128, 128, torch.bfloat16)
    assert_near_as_plain_pytorch(inputs, [4095, 1], [1, 1], max_seq_len=4095, alpha=128**-0.5)


@pytest.mark.gpu
def test_bitwise_reproducible():
    inputs, settings = random_inputs([900] * 20, 128, 128, torch.bfloat16), {"max_seq_len": 900, "alpha": 0.09}
    first, second = run(*inputs, [900] * 20, **settings), run(*inputs, [900] * 20, **settings)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_element_offsets_beyond_32_bits():
    """2048 columns times 1.1 million rows: 2.25e9 elements."""
    lengths = [1100] * 1000
    buffer = torch.zeros(sum(lengths), 2048, dtype=torch.bfloat16, device=DEVICE)
    gradients = torch.full_like(buffer, torch.nan)
    q, k, v = (buffer[:, column : column + 64].unflatten(1, (2, 32)) for column in (0, 64, 1984))
    dq, dk, dv = (gradients[:, column : column + 64].unflatten(1, (2, 32)) for column in (0, 64, 1984))
    last = slice(sum(lengths) - 1100, None)
    for tensor in (q, k, v):
        tensor[last] = torch.randn(1100, 2, 32)
    dout = torch.randn(sum(lengths), 2, 32, dtype=torch.bfloat16, device=DEVICE)
    settings = {"max_seq_len": 1100, "alpha": 0.18}
    out = kernels.attention_forward(q, k, v, offsets_of(lengths), longest=1100, **settings)
    kernels.attention_backward(dout, q, k, v, offsets_of(lengths), dq=dq, dk=dk, dv=dv, longest=1100, **settings)
    expected = oracle(q[last], k[last], v[last], dout[last], [1100], **settings)
    actual = {"out": out[last], "dq": dq[last], "dk": dk[last], "dv": dv[last]}
    assert max(errors(actual, expected).values()) < 2**-6
    assert not gradients[:, :128].isnan().any() and gradients[:, 128:1984].isnan().all()


@pytest.mark.gpu
def test_new_lengths_compile_nothing():
    settings, device = {"alpha": 0.18, "num_targets": None}, torch.cuda.current_device()
    names = ("_forward_kernel", "_dkdv_kernel", "_dq_kernel")
    counts = []
    for lengths, window in (([16, 1], 16), ([33, 17, 0], 1), ([48] * 16, 7), ([2], 33)):
        q, k, v, dout = random_inputs(lengths, 32, 32, torch.bfloat16)
        run(q, k, v, dout, lengths, max_seq_len=max(lengths), alpha=settings["alpha"], max_attn_len=window)
        counts.append([len(getattr(kernels, name).device_caches[device][0]) for name in names])
    assert counts.count(counts[0]) == len(counts), counts
