"""HSTU attention against golden values, against loops over the definition, and on ugly shapes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_hstu.ops import hstu_attention
from dlrm_hstu.ops.hstu_attention.reference import hstu_mask
from tests.batches import relative_error

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "attention.npz")
CASES = {case["name"]: case for case in json.loads(bytes(GOLDEN["cases_json"]))}
MASK_SETTINGS = ("contextual_seq_len", "max_attn_len", "min_full_attn_seq_len")
TOLERANCE = 1e-5  # relative to the tensor's own scale
HEADS, QK_DIM, V_DIM = 2, 8, 12


def offsets_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def random_inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout; scores have a deviation of about 9, far into SiLU's curved part and past it."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (3 * torch.randn(tokens, HEADS, QK_DIM, generator=generator) for _ in range(2))
    v, dout = (torch.randn(tokens, HEADS, V_DIM, generator=generator) for _ in range(2))
    return q, k, v, dout


def run(q, k, v, dout, offsets, **settings) -> dict[str, np.ndarray]:
    q, k, v = (tensor.clone().requires_grad_() for tensor in (q, k, v))
    out = hstu_attention(q, k, v, offsets, **settings)
    out.backward(dout)
    return {"out": out.detach().numpy(), "dq": q.grad.numpy(), "dk": k.grad.numpy(), "dv": v.grad.numpy()}


def sees(i: int, j: int, length: int, targets: int | None, contextual: int, window: int, min_full: int) -> bool:
    """The mask's definition for one query i and key j."""
    history = length - (targets or 0)
    if contextual:
        history -= contextual - 1

    def rank(place: int) -> int:
        if contextual:
            place = max(place - contextual + 1, 0)
        return place if targets is None else min(place, history)

    if i == j:
        return True
    if contextual and rank(i) == 0 and rank(j) < history:
        return True
    if rank(i) <= rank(j):
        return False
    is_near = not window or rank(i) - rank(j) <= window
    return is_near or (min_full > 0 and rank(i) >= history - min_full)


def expected(q, k, v, dout, lengths, num_targets=None, *, max_seq_len, alpha, contextual=0, window=0, min_full=0) -> dict[str, np.ndarray]:
    """Forward and backward in fp64, sample by sample and head by head, with the derivative written out."""
    q, k, v, dout = (tensor.double().numpy() for tensor in (q, k, v, dout))
    result = {"out": np.zeros_like(v), "dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    end = 0
    for b, length in enumerate(lengths):
        rows, end = slice(end, end + length), end + length
        targets = None if num_targets is None else int(num_targets[b])
        mask = np.array([[sees(i, j, length, targets, contextual, window, min_full) for j in range(length)] for i in range(length)])
        mask = mask.reshape(length, length)
        for h in range(q.shape[1]):
            q_, k_, v_, dout_ = q[rows, h], k[rows, h], v[rows, h], dout[rows, h]
            s = alpha * q_ @ k_.T
            sigmoid = 1 / (1 + np.exp(-s))
            p = mask * s * sigmoid / max_seq_len
            ds = mask * (dout_ @ v_.T) * sigmoid * (1 + s * (1 - sigmoid)) / max_seq_len
            result["out"][rows, h], result["dv"][rows, h] = p @ v_, p.T @ dout_
            result["dq"][rows, h], result["dk"][rows, h] = alpha * ds @ k_, alpha * ds.T @ q_
    return result


def assert_equal(actual: dict, reference: dict) -> None:
    errors = {name: relative_error(actual[name], reference[name]) for name in reference}
    assert max(errors.values()) < TOLERANCE, errors


def test_six_golden_cases():
    assert len(CASES) == 6


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = CASES[name]
    tensors = [torch.as_tensor(GOLDEN[f"{name}/{part}"]) for part in ("q", "k", "v", "dout", "offsets")]
    settings = {key: case[key] for key in ("max_seq_len", "alpha", *MASK_SETTINGS)}
    num_targets = None if case["num_targets"] is None else torch.tensor(case["num_targets"])
    actual = run(*tensors, num_targets=num_targets, **settings)
    assert_equal(actual, {part: GOLDEN[f"{name}/{part}"] for part in ("out", "dq", "dk", "dv")})


@pytest.mark.parametrize("seed", range(40))
def test_mask_equals_the_definition(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 20, size=4)
    num_targets = None if seed % 4 == 0 else rng.integers(0, np.minimum(lengths, 6) + 1)
    contextual = int(rng.integers(0, 5)) if seed % 2 else 0
    window = int(rng.integers(1, 9)) if seed % 3 else 0
    min_full = int(rng.integers(0, 7)) if window else 0
    targets = None if num_targets is None else torch.as_tensor(num_targets)
    mask = hstu_mask(torch.as_tensor(lengths), 21, targets, contextual, window, min_full)
    for b, length in enumerate(lengths):
        n = None if num_targets is None else int(num_targets[b])
        for i in range(21):
            for j in range(21):
                inside = i < length and j < length
                assert mask[b, i, j] == (inside and sees(i, j, length, n, contextual, window, min_full)), (b, i, j)


def test_one_target_without_prefix_is_plain_causal():
    mask = hstu_mask(torch.tensor([7]), 7, torch.tensor([1]))
    assert torch.equal(mask[0], torch.ones(7, 7).tril().bool())


def test_targets_see_all_history_and_themselves_only():
    mask = hstu_mask(torch.tensor([9]), 9, torch.tensor([3]))[0]
    assert mask[6:, :6].all() and torch.equal(mask[6:, 6:], torch.eye(3, dtype=torch.bool)) and not mask[:6, 6:].any()


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"contextual_seq_len": 3},
        {"max_attn_len": 5},
        {"max_attn_len": 4, "min_full_attn_seq_len": 10},
        {"contextual_seq_len": 3, "max_attn_len": 4, "min_full_attn_seq_len": 6},
    ],
)
@pytest.mark.parametrize("targets", [None, "one", "some", "all"])
def test_ugly_lengths(mask, targets):
    lengths = [0, 1, 63, 0, 64, 65, 0]
    choices = {None: None, "one": np.minimum(lengths, 1), "some": np.minimum(lengths, [0, 0, 7, 3, 20, 1, 5]), "all": np.array(lengths)}
    num_targets = choices[targets]
    inputs = random_inputs(sum(lengths))
    actual = run(
        *inputs,
        offsets_of(lengths),
        max_seq_len=70,
        alpha=QK_DIM**-0.5,
        num_targets=None if num_targets is None else torch.as_tensor(num_targets),
        **mask,
    )
    settings = dict(zip(("contextual", "window", "min_full"), (mask.get(name, 0) for name in MASK_SETTINGS), strict=True))
    assert_equal(actual, expected(*inputs, lengths, num_targets, max_seq_len=70, alpha=QK_DIM**-0.5, **settings))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_batch_of_one(length):
    inputs = random_inputs(length, seed=length)
    actual = run(*inputs, offsets_of([length]), max_seq_len=length, alpha=0.3, num_targets=torch.tensor([1]))
    assert_equal(actual, expected(*inputs, [length], [1], max_seq_len=length, alpha=0.3))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_at_all(lengths):
    actual = run(*random_inputs(0), offsets_of(lengths), max_seq_len=8, alpha=1.0, num_targets=torch.zeros(len(lengths), dtype=torch.int64))
    assert {name: value.shape for name, value in actual.items()} == {
        "out": (0, HEADS, V_DIM),
        "dq": (0, HEADS, QK_DIM),
        "dk": (0, HEADS, QK_DIM),
        "dv": (0, HEADS, V_DIM),
    }


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_poison_in_one_sample_stays_there(bad, poison):
    lengths, offsets = [5, 9, 3], offsets_of([5, 9, 3])
    inputs = random_inputs(sum(lengths))
    settings = dict(max_seq_len=9, alpha=0.35, num_targets=torch.ones(3, dtype=torch.int64))
    clean = run(*inputs, offsets, **settings)
    rows = slice(offsets[bad], offsets[bad + 1])
    for tensor in inputs:
        tensor[rows] = poison
    dirty = run(*inputs, offsets, **settings)
    for name, value in dirty.items():
        assert np.isnan(value[rows]).any()
        np.testing.assert_array_equal(np.delete(value, np.r_[rows], axis=0), np.delete(clean[name], np.r_[rows], axis=0))


def test_later_tokens_do_not_reach_earlier_ones():
    q, k, v, dout = random_inputs(12)
    settings = dict(offsets=offsets_of([12]), max_seq_len=12, alpha=0.35, num_targets=torch.tensor([1]))
    before = run(q, k, v, dout, **settings)["out"]
    for tensor in (q, k, v):
        tensor[8:] += 1
    after = run(q, k, v, dout, **settings)["out"]
    np.testing.assert_array_equal(before[:8], after[:8])
    assert (np.abs(before[8:] - after[8:]).max(axis=(1, 2)) > 1e-3).all()


def test_strided_views_equal_contiguous_tensors():
    """The model passes column slices of one wide tensor."""
    lengths = [4, 6]
    wide = torch.randn(10, 3 * HEADS * QK_DIM, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(1, (HEADS, QK_DIM)) for part in wide.split(HEADS * QK_DIM, dim=1))
    settings = dict(max_seq_len=6, alpha=0.35)
    views = hstu_attention(q, k, v, offsets_of(lengths), **settings)
    assert torch.equal(views, hstu_attention(q.contiguous(), k.contiguous(), v.contiguous(), offsets_of(lengths), **settings))


def test_bfloat16_keeps_dtype_and_is_near():
    q, k, v, _ = random_inputs(20)
    settings = dict(offsets=offsets_of([12, 8]), max_seq_len=12, alpha=0.35)
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    out = hstu_attention(q, k, v, **settings)
    assert out.dtype == torch.bfloat16
    assert relative_error(out.float(), hstu_attention(q.float(), k.float(), v.float(), **settings)) < 2**-8


def test_unknown_backend_lists_what_there_is():
    q, k, v, _ = random_inputs(3)
    with pytest.raises(ValueError, match="backend='nonsense' does not exist; choose auto or one of .*reference"):
        hstu_attention(q, k, v, offsets_of([3]), max_seq_len=3, alpha=1.0, backend="nonsense")


@pytest.mark.parametrize("part", ["tokens of k", "tokens of v", "heads of v", "width of k"])
def test_shapes_that_do_not_fit_raise(part):
    q, k, v, _ = random_inputs(3)
    if part == "tokens of k":
        k = k[:2]
    elif part == "tokens of v":
        v = v[:2]
    elif part == "heads of v":
        v = v[:, :1]
    else:
        k = k[..., :4]
    with pytest.raises(ValueError, match="must agree"):
        hstu_attention(q, k, v, offsets_of([3]), max_seq_len=3, alpha=1.0)


def test_min_full_without_a_window_raises():
    q, k, v, _ = random_inputs(3)
    with pytest.raises(ValueError, match="min_full_attn_seq_len=2 widens a window; set max_attn_len"):
        hstu_attention(q, k, v, offsets_of([3]), max_seq_len=3, alpha=1.0, min_full_attn_seq_len=2)
