"""Dropout masks as a function of place: statistics, independence, and that any part of a mask can be made alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrm_hstu.ops import DropoutKey, dropout, norm_gate_dropout
from dlrm_hstu.ops.counter_dropout import mix64, random_bits, row_keys

KEY = DropoutKey(seed=11, step=5, site=2)
ROWS, COLUMNS = 512, 768


def places(rows: int = ROWS, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """(sample, position) of `rows` tokens."""
    index = torch.arange(rows)
    return index % samples, index // samples


def bits(key: DropoutKey = KEY, rows=None, columns: int = COLUMNS, first_column: int = 0) -> torch.Tensor:
    return random_bits(row_keys(key.mixed(), *(rows or places())), columns, first_column)


def kept(p: float, key: DropoutKey = KEY, rows=None, columns: int = COLUMNS) -> torch.Tensor:
    """bool [rows, columns]: the mask."""
    rows = rows or places()
    return dropout(torch.ones(len(rows[0]), columns), p, key, rows) != 0


def z_score(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two equally long bit fields in standard deviations of independent ones."""
    return abs(torch.corrcoef(torch.stack([a.flatten().float(), b.flatten().float()]))[0, 1].item()) * math.sqrt(a.numel())


def chi_square_z(values: torch.Tensor, bins: int) -> float:
    """Deviation of a histogram of integers in [0, bins) from uniform, in standard deviations of chi-square."""
    counts = torch.bincount(values.flatten().long(), minlength=bins).double()
    mean = values.numel() / bins
    return abs(((counts - mean) ** 2 / mean).sum().item() - (bins - 1)) / math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0.8833108082136426),
        (1, 0.5665615751722809),
        (2, 0.5911897341980794),
        (1_000_000, 0.4064500812937668),
        (1 + 7, 0.6185046250316943),
    ],
)
def test_mix64_published_fractions(value, expected):
    assert (mix64(value) >> 11) * 2.0**-53 == expected


def test_mix64_published_stream():
    """The first numbers of splitmix64 from state 1234567, as its authors' program prints them."""
    stream = [mix64(1234567 + i * 0x9E3779B97F4A7C15) for i in range(4)]
    assert stream == [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0x9E3779B97F4A7C15, 123456789012345678901])
def test_tensor_and_host_mix64_agree(key):
    first = [0, 1, -1, 7, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
    second = [0, -1, 5, 2**40, 2**63 - 1, -(2**63), 1, 3]
    low, high = row_keys(key, torch.tensor(first), torch.tensor(second))
    assert low.dtype == high.dtype == torch.int32
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert (int(high[i]) % 2**32) << 32 | int(low[i]) % 2**32 == mix64(mix64(key + a) + b)


def test_row_keys_do_not_depend_on_the_integer_type():
    sample, position = places()
    wide, narrow = row_keys(3, sample, position), row_keys(3, sample.int(), position.int())
    assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))


def test_random_bits_equal_murmur3_finalizer():
    """Element by element with host integers: fmix32(column * golden + low), with `high` mixed in half way."""
    low, high = row_keys(9, *places(5))
    actual = random_bits((low, high), 6, first_column=2**31 - 3)
    for row in range(5):
        for column in range(6):
            h = ((2**31 - 3 + column) * 0x9E3779B9 + int(low[row])) % 2**32
            h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
            h ^= int(high[row]) % 2**32
            h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
            assert int(actual[row, column]) % 2**32 == h ^ h >> 16


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_bits_are_uniform(shift):
    assert chi_square_z(bits(rows=places(2048)) >> shift & 0xFF, 256) < 5


def test_top_bits_of_neighbours_are_jointly_uniform():
    top = bits(rows=places(2048)) >> 28 & 0xF
    for a, b in ((top[:, :-1], top[:, 1:]), (top[:-1], top[1:]), (top[:-8], top[8:])):
        assert chi_square_z(a * 16 + b, 256) < 5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_keep_rate(p):
    keep = kept(p).double()
    deviation = math.sqrt(p * (1 - p) / keep.numel())
    assert abs(keep.mean() - (1 - p)) < 5 * deviation
    for axis, count in ((0, ROWS), (1, COLUMNS)):
        assert (keep.mean(axis) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / count) + 1 / count


def test_kept_values_are_scaled_and_the_rest_is_zero():
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    out, keep = dropout(x, 0.25, KEY, places()), kept(0.25)
    assert torch.equal(out[keep], x[keep] / 0.75) and not out[~keep].any()


def test_gradient_goes_through_the_mask():
    x = torch.randn(ROWS, COLUMNS).requires_grad_()
    gradient = torch.randn(ROWS, COLUMNS)
    dropout(x, 0.25, KEY, places()).backward(gradient)
    assert torch.equal(x.grad, torch.where(kept(0.25), gradient / 0.75, 0))


def test_dropped_nan_is_zero_forward_and_backward():
    x = torch.full((ROWS, COLUMNS), torch.nan).requires_grad_()
    out = dropout(x, 0.5, KEY, places())
    out.backward(torch.ones_like(out))
    assert torch.equal(out.isnan(), kept(0.5)) and x.grad.isfinite().all()


def test_no_dropout_returns_the_input_itself():
    x = torch.ones(4, 3)
    assert dropout(x, 0.0, KEY, places(4)) is x
    assert dropout(x, 0.5, None, places(4)) is x


def test_dtype_is_kept_and_mask_does_not_depend_on_it():
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    out = dropout(x, 0.5, KEY, places())
    assert out.dtype == torch.bfloat16 and torch.equal(out != 0, kept(0.5))


def test_any_rows_alone_have_the_mask_of_the_full_tensor():
    sample, position = places()
    chosen = torch.tensor([500, 3, 3, 77, 0])
    assert torch.equal(kept(0.3, rows=(sample[chosen], position[chosen])), kept(0.3)[chosen])


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 5), (255, 513), (767, 1)])
def test_any_columns_alone_have_the_bits_of_the_full_tensor(first, count):
    assert torch.equal(bits(columns=count, first_column=first), bits()[:, first : first + count])


def test_width_of_the_tensor_does_not_matter():
    assert torch.equal(kept(0.3, columns=100), kept(0.3)[:, :100])


def test_torch_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    first, state = kept(0.5), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, kept(0.5))
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("change", [{"seed": 12}, {"seed": -11}, {"step": 6}, {"site": 3}, {"seed": 5, "step": 11}, {"step": 2, "site": 5}])
def test_keys_are_independent(change):
    assert z_score(kept(0.5), kept(0.5, replace(KEY, **change))) < 5


def test_steps_and_sites_of_a_run_share_no_key():
    keys = {DropoutKey(seed, step, site).mixed() for seed in (0, 1, -1) for step in range(2000) for site in range(6)}
    assert len(keys) == 3 * 2000 * 6


@pytest.mark.parametrize(("row_lag", "column_lag"), [(1, 0), (8, 0), (0, 1), (0, 256), (1, 1), (8, 256), (1, 512), (7, 3)])
def test_rows_and_columns_are_independent(row_lag, column_lag):
    keep = kept(0.5)
    a, b = keep[: ROWS - row_lag, : COLUMNS - column_lag], keep[row_lag:, column_lag:]
    assert z_score(a, b) < 5


def test_swapped_sample_and_position_are_independent():
    sample, position = places()
    off_diagonal = sample != position
    assert z_score(kept(0.5)[off_diagonal], kept(0.5, rows=(position, sample))[off_diagonal]) < 5


def test_no_two_rows_are_alike_at_any_column_shift():
    """Circular correlations of all row pairs: 8 standard deviations would be met once in 10^15 independent pairs."""
    signs = bits(rows=places(96), columns=1024).sign().double().numpy()
    spectra = np.fft.rfft(signs)
    for row in range(96):
        correlations = np.fft.irfft(spectra[row].conj() * spectra[row:]) / math.sqrt(1024)
        correlations[0, 0] = 0
        assert np.abs(correlations).max() < 8


def parts(p: float, rows: int = ROWS) -> torch.Tensor:
    """bool [3, rows, 256]: masks of the three parts an STU layer concatenates, of ones; the rows are one sample's."""
    ones = torch.ones(rows, 256)
    y = norm_gate_dropout(ones, ones, torch.zeros(256), torch.ones(256), eps=1e-6, p=p, key=KEY, rows=places(rows, samples=1))
    return (y != 0).unflatten(1, (3, 256)).transpose(0, 1)


def test_three_parts_of_a_layer_keep_their_rate():
    assert ((parts(0.5).double().mean((1, 2)) - 0.5).abs() < 0.02).all()


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("other", range(3))
def test_part_of_a_row_is_not_another_part_of_the_next_row(part, other):
    masks = parts(0.5)
    assert not (masks[part, :-1] == masks[other, 1:]).all(1).any()
    assert z_score(masks[part, :-1], masks[other, 1:]) < 5
    if part != other:
        assert z_score(masks[part], masks[other]) < 5


def test_parts_of_a_layer_follow_one_mask_of_all_columns():
    assert torch.equal(parts(0.3).transpose(0, 1).flatten(1), kept(0.3, rows=places(samples=1), columns=768))
