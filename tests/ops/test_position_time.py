"""Position and time encoding against loops over its formula."""

import math

import pytest
import torch

from dlrm_hstu.ops import add_position_time
from tests.batches import relative_error

DAY = 86400


def encode(z, position_table, time_table, lengths, num_targets, ages, contextual) -> torch.Tensor:
    """The op on whole sequences of `lengths` tokens."""
    position = torch.cat([torch.arange(length) for length in lengths])
    history_end = torch.cat([torch.full((length,), length - n) for length, n in zip(lengths, num_targets, strict=True)])
    return add_position_time(
        z, position_table, time_table, position=position, history_end=history_end, age=ages, contextual_seq_len=contextual
    )


def by_loops(z, position_table, time_table, lengths, num_targets, ages, contextual) -> torch.Tensor:
    rows, t = [], 0
    for length, targets in zip(lengths, num_targets, strict=True):
        for j in range(length):
            place = j if j < contextual else min((length - targets) - min(j, length - targets) + contextual, len(position_table) - 1)
            bucket = min(int(math.sqrt(max(float(ages[t]), 1e-6) / 60)), len(time_table) - 1)
            rows.append(math.sqrt(z.shape[1]) * z[t] + position_table[place] + time_table[bucket])
            t += 1
    return torch.stack(rows)


def tables(positions: int, buckets: int, width: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, width, generator=generator) for rows in (positions, buckets + 1))


@pytest.mark.parametrize("contextual", [0, 1, 8])
@pytest.mark.parametrize("positions", [9, 12, 64])
def test_equals_the_formula(contextual, positions):
    """Several candidates, none, an empty history, and a place table shorter than the sequences."""
    histories, num_targets = [0, 1, 5, 30, 7], [1, 2, 1, 4, 0]
    lengths = [contextual + history + n for history, n in zip(histories, num_targets, strict=True)]
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(sum(lengths), 4, generator=generator)
    ages = (10 ** (8 * torch.rand(sum(lengths), generator=generator))).long() - 1
    arguments = (z, *tables(positions, 40, 4), lengths, num_targets, ages, contextual)
    assert relative_error(encode(*arguments), by_loops(*arguments)) < 1e-6


def place_of_tokens(length: int, targets: int, contextual: int, positions: int = 64) -> list[int]:
    table = torch.arange(positions).float()[:, None]
    return (
        encode(torch.zeros(length, 1), table, torch.zeros(2, 1), [length], [targets], torch.zeros(length), contextual)[:, 0].int().tolist()
    )


def test_places_count_from_the_newest_history_token():
    assert place_of_tokens(8, 2, 3) == [0, 1, 2, 6, 5, 4, 3, 3]
    assert place_of_tokens(4, 1, 0) == [3, 2, 1, 0]


def test_places_of_old_tokens_clamp_at_the_tables_end():
    assert place_of_tokens(8, 1, 2, positions=5) == [0, 1, 4, 4, 4, 4, 3, 2]


def buckets_of_ages(ages: list[int], buckets: int = 2048, width: int = 4) -> list[int]:
    table = torch.arange(buckets + 1).float()[:, None].expand(-1, width)
    n = len(ages)
    return encode(torch.zeros(n, width), torch.zeros(n, width), table, [n], [0], torch.tensor(ages), 0)[:, 0].int().tolist()


def test_buckets_are_the_truncated_root_of_minutes():
    assert buckets_of_ages([0, 59, 60, 239, 240, 539, 540, DAY]) == [0, 0, 1, 1, 2, 2, 3, 37]


def test_buckets_clamp_at_the_table_and_not_at_the_width():
    last = 2048**2 * 60
    assert buckets_of_ages([512**2 * 60, last - 10**5, last, last + 10**6, 2**31 - 1]) == [512, 2047, 2048, 2048, 2048]


def test_negative_age_is_bucket_zero():
    assert buckets_of_ages([-1, -(10**6)]) == [0, 0]


def test_gradients_equal_the_formulas():
    lengths, num_targets, contextual = [9, 12], [1, 2], 3
    ages = torch.arange(21) * 50

    def gradients(function) -> list[torch.Tensor]:
        z = torch.randn(21, 4, generator=torch.Generator().manual_seed(2))
        inputs = [tensor.requires_grad_() for tensor in (z, *tables(9, 3, 4))]
        weight = torch.randn(21, 4, generator=torch.Generator().manual_seed(3))
        (function(*inputs, lengths, num_targets, ages, contextual) * weight).sum().backward()
        return [tensor.grad for tensor in inputs]

    for actual, expected in zip(gradients(encode), gradients(by_loops), strict=True):
        assert relative_error(actual, expected) < 1e-6


def test_bfloat16_rounds_the_summed_encoding_once():
    """The two rows are added in fp32 and cast; the result has the tokens' type."""
    position_table, time_table = torch.full((4, 2), 1.0), torch.full((3, 2), 2**-8)
    out = encode(torch.zeros(4, 2, dtype=torch.bfloat16), position_table, 3 * time_table, [4], [1], torch.zeros(4), 0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), torch.tensor(1 + 3 * 2**-8).bfloat16().float().expand(4, 2))
