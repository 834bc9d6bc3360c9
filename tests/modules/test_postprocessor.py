"""User embeddings of candidates against the formula."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from dlrm_hstu.modules.postprocessor import TimestampPostprocessor
from tests.batches import relative_error, small_config


def build() -> TimestampPostprocessor:
    """With random weights and biases, small so that epsilon shows; a bare module's weights are memory as found."""
    module = TimestampPostprocessor(small_config())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.05, generator=generator)
    return module


def clock(time: int) -> list[float]:
    """cos and sin of the hour of the day and of the day of the week, with the benchmark's 3.14."""
    hour, weekday = time // 3600 % 24, time // 86400 % 7
    angles = (hour / 24 * 2 * 3.14, weekday / 7 * 2 * 3.14)
    return [function(angle) for angle in angles for function in (math.cos, math.sin)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_formula(dtype):
    module = build()
    times = [0, 3599, 3600, 86399, 86400, 6 * 86400 + 23 * 3600, 7 * 86400, 26_000_000, 2**31 - 1]
    candidate = torch.randn(len(times), 32, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([candidate, torch.tensor([clock(time) for time in times])], dim=1)
    expected = layer_norm(
        linear(rows, module.time_combiner.weight, module.time_combiner.bias), (32,), module.norm.weight, module.norm.bias, 1e-5
    )
    assert relative_error(module(candidate, torch.tensor(times, dtype=dtype)).detach(), expected.detach()) < 2e-6


def test_time_is_read_in_whole_hours():
    module = build()
    candidate = torch.ones(3, 32)
    first, same, other = module(candidate, torch.tensor([7200, 10799, 10800]))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_no_candidates():
    assert build()(torch.zeros(0, 32), torch.zeros(0, dtype=torch.int32)).shape == (0, 32)
