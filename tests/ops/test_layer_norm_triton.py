"""Layer norm kernels against fp64. On a CPU they run in Triton's interpreter, in fp32."""

import importlib
import inspect
import os

import pytest
import torch
from torch.nn.functional import layer_norm

from tests.batches import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
pytest.importorskip("triton")
tl = importlib.import_module("triton.language")
kernels = importlib.import_module("dlrm_hstu.ops.layer_norm.triton")

EPS = 1e-6
SHAPES = [(0, 32), (1, 24), (65, 130), (3, 512), (2, 1000)]
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bf16 bit patterns")],
    ),
]


def view(length: int, columns: int, dtype: torch.dtype, filler: float = float("nan")) -> torch.Tensor:
    """[T, D] of a poisoned [T, 4 * D] buffer, as q, k, v and u are of one buffer."""
    return torch.full((length, 4 * columns), filler, dtype=dtype, device=DEVICE)[:, columns : 2 * columns]


def random_view(length: int, columns: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return view(length, columns, dtype).copy_(scale * torch.randn(length, columns, device=DEVICE) + shift)


def parameters(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(columns, device=DEVICE) + 1, torch.randn(columns, device=DEVICE)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(actual.detach().double().cpu(), expected.detach().double().cpu())


def autograd(x, weight, bias, dy, dtype) -> list[torch.Tensor]:
    """y, dx, dweight, dbias of plain PyTorch, all in one dtype."""
    x, weight, bias = (tensor.to(dtype).detach().requires_grad_() for tensor in (x, weight, bias))
    y = layer_norm(x, weight.shape, weight, bias, EPS)
    return [y, *torch.autograd.grad(y, (x, weight, bias), dy.to(dtype))]


def kernel(x, weight, bias, dy, **keywords) -> list[torch.Tensor]:
    y, mean, rstd = kernels.layer_norm_forward(x, weight, bias, EPS)
    return [y, *kernels.layer_norm_backward(dy, x, weight, mean, rstd, **keywords)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "columns"), SHAPES)
def test_forward_and_gradients(length, columns, dtype):
    x, dy = random_view(length, columns, dtype, 3, 2), random_view(length, columns, dtype)
    weight, bias = parameters(columns)
    ours, exact = kernel(x, weight, bias, dy), autograd(x, weight, bias, dy, torch.float64)
    plain = autograd(x, weight, bias, dy, dtype)
    assert ours[0].dtype == ours[1].dtype == dtype and ours[2].dtype == ours[3].dtype == torch.float32
    for index, (a, b, c) in enumerate(zip(ours, exact, plain, strict=True)):
        assert error(a, b) <= (1e-5 if dtype == torch.float32 else max(2**-9, (5 if index else 2) * error(c, b)))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_any_launch_gives_the_same(rows, monkeypatch):
    """Tiles of several rows, the last one ragged, and programs that walk several tiles."""
    launch = {"default": kernels.RowLaunch(rows=rows, warps=1, stages=1, programs=2)}
    monkeypatch.setattr(kernels, "_FORWARD", launch)
    monkeypatch.setattr(kernels, "_BACKWARD", launch)
    x, dy = (random_view(19 if DEVICE == "cpu" else 2000, 24, torch.float32) for _ in range(2))
    weight, bias = parameters(24)
    for ours, exact in zip(kernel(x, weight, bias, dy), autograd(x, weight, bias, dy, torch.float64), strict=True):
        assert error(ours, exact) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [24, 512])
def test_residual_and_destination(columns, dtype):
    """dx + residual_gradient lands in a view of a poisoned buffer and touches nothing else; dx may be dy."""
    length = 5
    x, dy, residual = (random_view(length, columns, dtype) for _ in range(3))
    weight, bias = parameters(columns)
    expected = autograd(x, weight, bias, dy, torch.float64)[1] + residual.double()
    buffer = torch.full((length, 2 * columns), 7.0, dtype=dtype, device=DEVICE)
    dx = kernel(x, weight, bias, dy, residual_gradient=residual, dx=buffer[:, :columns])[1]
    assert dx.data_ptr() == buffer.data_ptr() and (buffer[:, columns:] == 7).all()
    assert error(dx, expected) < (1e-5 if dtype == torch.float32 else 2**-7)
    in_place = dy.clone()
    assert error(kernel(x, weight, bias, in_place, residual_gradient=residual, dx=in_place)[1], dx) < (
        1e-6 if dtype == torch.float32 else 2**-8
    )


def test_a_poisoned_row_stays_alone():
    length, columns = 12, 24
    x, dy = random_view(length, columns, torch.float32), random_view(length, columns, torch.float32)
    weight, bias = parameters(columns)
    clean = kernel(x, weight, bias, dy)
    x[3], x[11], dy[7] = float("nan"), float("inf"), float("nan")
    poisoned = kernel(x, weight, bias, dy)
    others = [row for row in range(length) if row not in (3, 11, 7)]
    assert torch.equal(poisoned[0][others], clean[0][others]) and torch.equal(poisoned[1][others], clean[1][others])


def test_constant_rows_are_finite():
    weight, bias = parameters(24)
    y, mean, rstd = kernels.layer_norm_forward(torch.full((2, 24), 7.0, device=DEVICE), weight, bias, EPS)
    assert (mean == 7).all() and torch.allclose(y, bias.expand(2, -1), atol=1e-5) and rstd.isfinite().all()


def test_bad_arguments_raise():
    x, (weight, bias) = torch.zeros(4, 8, device=DEVICE), parameters(8)
    for arguments in [(x.T, *parameters(4), EPS), (x, weight[:4], bias, EPS), (x, weight.double(), bias, EPS)]:
        with pytest.raises(ValueError, match="layer_norm"):
            kernels.layer_norm_forward(*arguments)
    _, mean, rstd = kernels.layer_norm_forward(x, weight, bias, EPS)
    with pytest.raises(ValueError, match="dy has shape"):
        kernels.layer_norm_backward(x[:3], x, weight, mean, rstd)


@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_no_compile_time_constant_comes_from_a_batch(name):
    signature = inspect.signature(getattr(kernels, name).fn).parameters
    constants = {name for name, parameter in signature.items() if parameter.annotation is tl.constexpr}
    assert constants == {"D", "BLOCK_T", "BLOCK_D", "STAGES"}


@pytest.mark.gpu
def test_weight_gradients_of_many_rows_repeat_and_are_exact():
    """Every program walks many tiles, the last one ragged."""
    length, columns = 40_003, 512
    x, dy = (random_view(length, columns, torch.bfloat16) for _ in range(2))
    weight, bias = parameters(columns)
    first, second = (kernel(x, weight, bias, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for ours, exact in zip(first, autograd(x, weight, bias, dy, torch.float64), strict=True):
        assert error(ours, exact) < (1e-5 if ours.dtype == torch.float32 else 2**-8)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements():
    length, columns = 2**31 // 2048 + 1000, 512
    x = torch.empty(length, 2048, dtype=torch.bfloat16, device=DEVICE).normal_()[:, :columns]
    weight, bias = parameters(columns)
    ours, tail = kernel(x, weight, bias, x), slice(length - 1100, None)
    exact = autograd(x[tail], weight, bias, x[tail], torch.float64)
    assert error(ours[0][tail], exact[0]) < 2**-8 and error(ours[1][tail], exact[1]) < 2**-7
