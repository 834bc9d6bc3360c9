"""Layer norm, the swish gate and the STU gate against fp64 formulas."""

import pytest
import torch

from dlrm_hstu.ops import layer_norm, norm_gate_dropout, swish_layer_norm
from tests.batches import relative_error

ROWS, WIDTH = 37, 24


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with a mean and a scale far from (0, 1), weight, bias."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(ROWS, WIDTH, generator=generator) + 2
    return x, torch.randn(WIDTH, generator=generator) + 1, torch.randn(WIDTH, generator=generator)


def normalized(x, weight, bias, eps):
    centered = x - x.mean(1, keepdim=True)
    return centered / torch.sqrt((centered**2).mean(1, keepdim=True) + eps) * weight + bias


def gated(x, weight, bias, eps):
    return x * torch.sigmoid(normalized(x, weight, bias, eps))


OPS = [(layer_norm, normalized), (swish_layer_norm, gated)]


@pytest.mark.parametrize(("op", "formula"), OPS)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_forward_and_gradients(op, formula, eps):
    ours = [tensor.clone().requires_grad_() for tensor in inputs()]
    exact = [tensor.double().clone().requires_grad_() for tensor in inputs()]
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    out, expected = op(*ours, eps), formula(*exact, eps)
    assert relative_error(out.detach(), expected.detach()) < 2e-6
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, exact, strict=True):
        assert relative_error(a.grad, b.grad) < 5e-6


@pytest.mark.parametrize(("op", "formula"), OPS)
def test_bfloat16_has_fp32_statistics(op, formula):
    """One rounding of the result is all that may be lost: a mean of 100 leaves no bit of a bfloat16 sum of squares."""
    x, weight, bias = inputs()
    x = (x + 100).bfloat16()
    out = op(x, weight, bias, 1e-5)
    assert out.dtype == torch.bfloat16
    assert relative_error(out.float(), formula(x.double(), weight.double(), bias.double(), 1e-5)) < 2**-8


@pytest.mark.parametrize("op", [layer_norm, swish_layer_norm])
def test_no_rows_and_constant_rows(op):
    _, weight, bias = inputs()
    assert op(torch.zeros(0, WIDTH), weight, bias, 1e-5).shape == (0, WIDTH)
    assert op(torch.full((2, WIDTH), 7.0), weight, bias, 1e-5).isfinite().all()


def test_gate_concatenates_u_attention_and_gated_norm():
    attention, weight, bias = inputs()
    u = inputs(seed=5)[0]
    rows = (torch.zeros(ROWS), torch.arange(ROWS))
    y = norm_gate_dropout(attention, u, weight, bias, eps=1e-6, p=0.5, key=None, rows=rows)
    assert relative_error(y, torch.cat([u, attention, normalized(attention.double(), weight, bias, 1e-6) * u], dim=1)) < 2e-6
