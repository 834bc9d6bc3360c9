"""The gate's kernels, which apply silu to u themselves, against fp64. On a CPU they run in Triton's interpreter, in fp32."""

import importlib
import inspect
import os

import pytest
import torch
from torch.nn.functional import layer_norm, silu

from dlrm_hstu.ops import DropoutKey, dropout
from tests.batches import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
pytest.importorskip("triton")
tl = importlib.import_module("triton.language")
kernels = importlib.import_module("dlrm_hstu.ops.norm_gate_dropout.triton")
RowLaunch = kernels.RowLaunch

EPS = 1e-6
KEY = DropoutKey(seed=11, step=5, site=2)
SHAPES = [(0, 32), (1, 24), (5, 130), (3, 512), (2, 1000)]
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bf16 bit patterns")],
    ),
]


class Case:
    """Random arguments; u is a view of the first D of 4 * D poisoned columns, dy a view of 3 * D of 4 * D."""

    def __init__(self, length: int, columns: int, dtype: torch.dtype, p: float = 0.3, key: DropoutKey | None = KEY):
        def buffer() -> torch.Tensor:
            return torch.full((length, 4 * columns), float("nan"), dtype=dtype, device=DEVICE)

        def values(width: int) -> torch.Tensor:
            return torch.randn(length, width, device=DEVICE).to(dtype)

        index = torch.arange(length, device=DEVICE)
        self.p, self.key, self.rows = p, key, (index % 3, index // 3)
        self.a, self.u = 2 * values(columns) + 1, buffer()[:, :columns].copy_(2 * values(columns))
        self.dy = buffer()[:, : 3 * columns].copy_(values(3 * columns))
        self.weight, self.bias = torch.randn(columns, device=DEVICE) + 1, torch.randn(columns, device=DEVICE)

    def plain(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """y, da, du, dweight, dbias of plain PyTorch, all in one dtype."""
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in (self.a, self.u, self.weight, self.bias)]
        a, u, weight, bias = leaves
        gate = silu(u)
        y = dropout(torch.cat([gate, a, layer_norm(a, weight.shape, weight, bias, EPS) * gate], dim=1), self.p, self.key, self.rows)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy.to(dtype))]

    def draw(self) -> dict:
        return {"p": self.p, "key": None if self.key is None else self.key.mixed(), "rows": self.rows}

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return kernels.norm_gate_dropout_forward(self.a, self.u, self.weight, self.bias, eps=EPS, **self.draw())

    def kernel(self, **destinations) -> list[torch.Tensor]:
        y, mean, rstd = self.forward()
        gradients = kernels.norm_gate_dropout_backward(
            self.dy, self.a, self.u, self.weight, self.bias, mean, rstd, **self.draw(), **destinations
        )
        return [y, *gradients]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(actual.double().cpu(), expected.double().cpu())


def assert_right(case: Case, dtype: torch.dtype) -> None:
    """fp32: 1e-5 of the scale. bf16: twice (gradients: five times) what plain PyTorch loses, but no less than one rounding."""
    ours, exact, plain = case.kernel(), case.plain(torch.float64), case.plain(dtype)
    assert [tensor.dtype for tensor in ours] == [dtype] * 3 + [torch.float32] * 2
    for index, (a, b, c) in enumerate(zip(ours, exact, plain, strict=True)):
        assert error(a, b) <= (1e-5 if dtype == torch.float32 else max(2**-9, (5 if index else 2) * error(c, b)))
    assert torch.equal(ours[0] == 0, exact[0] == 0), "the mask is not the specification's"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "columns"), SHAPES)
def test_forward_and_gradients(length, columns, dtype):
    assert_right(Case(length, columns, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("p", "key"), [(0.0, KEY), (0.3, None)])
def test_without_dropout(p, key, dtype):
    assert_right(Case(5, 24, dtype, p, key), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_any_launch_gives_the_same(rows, dtype, monkeypatch):
    """Tiles of several rows, the last one ragged, and programs that walk several tiles."""
    launch = {"default": RowLaunch(rows=rows, warps=1, stages=1, programs=2)}
    monkeypatch.setattr(kernels, "_FORWARD", launch)
    monkeypatch.setattr(kernels, "_BACKWARD", launch)
    assert_right(Case(19 if DEVICE == "cpu" else 2000, 24, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "p"), [(24, 0.0), (24, 0.3), (512, 0.3)])
def test_destinations(columns, p, dtype):
    """du lands in a view and touches nothing else; y comes out again, into a poisoned buffer or over dy."""
    case = Case(3, columns, dtype, p)
    expected = case.kernel()
    buffer = torch.full((3, 4 * columns), 7.0, dtype=dtype, device=DEVICE)
    y = torch.full_like(expected[0], float("nan"))
    written = case.kernel(du=buffer[:, :columns], y=y)
    assert written[2].data_ptr() == buffer.data_ptr() and (buffer[:, columns:] == 7).all()
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    assert error(y, expected[0]) <= rounding and torch.equal(y == 0, expected[0] == 0)
    case.dy = case.dy.clone()
    over = case.kernel(y=case.dy)
    assert error(case.dy, y) <= rounding
    for a, b, c in zip(expected[1:], written[1:], over[1:], strict=True):
        assert error(b, a) <= rounding and error(c, a) <= rounding


def test_a_poisoned_row_stays_alone_and_drops_to_zero():
    case = Case(12, 24, torch.float32)
    clean, clean_y = case.kernel(y=(y := torch.empty(12, 72, device=DEVICE))), y.clone()
    case.a[3], case.u[11], case.dy[7] = float("nan"), float("inf"), float("nan")
    poisoned = case.kernel(y=y)
    others = [row for row in range(12) if row not in (3, 11, 7)]
    assert torch.equal(y[others], clean_y[others])
    for index in range(3):
        assert torch.equal(poisoned[index][others], clean[index][others])
    assert torch.equal(poisoned[0][3, 24:] == 0, clean[0][3, 24:] == 0), "a dropped NaN is 0"


def test_a_row_alone_is_the_row_of_the_batch():
    """What the last layer relies on when it computes candidate rows only."""
    case = Case(9, 24, torch.float32)
    together = case.forward()[0]
    case.a, case.u, case.rows = case.a[7:8], case.u[7:8], tuple(tensor[7:8] for tensor in case.rows)
    assert torch.equal(case.forward()[0], together[7:8])


def test_bad_arguments_raise():
    case = Case(4, 8, torch.float32)
    for name, value in [("u", case.u[:3]), ("a", case.a.T.contiguous().T), ("p", 1.5), ("rows", (case.rows[0][:3], case.rows[1]))]:
        good = getattr(case, name)
        setattr(case, name, value)
        with pytest.raises(ValueError, match="dropout"):
            case.forward()
        setattr(case, name, good)
    case.dy = case.dy[:, :8]
    with pytest.raises(ValueError, match="dy has shape"):
        case.kernel()


@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_no_compile_time_constant_comes_from_a_batch(name):
    signature = inspect.signature(getattr(kernels, name).fn).parameters
    constants = {name for name, parameter in signature.items() if parameter.annotation is tl.constexpr}
    assert constants == {"D", "BLOCK_T", "BLOCK_D", "STAGES", "FAST"}


@pytest.mark.gpu
def test_many_rows_repeat_and_are_exact():
    """Every program walks many tiles."""
    case = Case(20_003, 512, torch.bfloat16)
    first, second = case.kernel(), case.kernel()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for ours, exact in zip(first, case.plain(torch.float64), strict=True):
        assert error(ours, exact) < (2e-5 if ours.dtype == torch.float32 else 2**-7)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements():
    case, tail = Case(2**31 // 1536 + 1000, 512, torch.bfloat16), slice(-1100, None)
    ours = case.kernel(y=(y := torch.empty(len(case.u), 1536, dtype=torch.bfloat16, device=DEVICE)))
    case.a, case.u, case.dy, case.rows = case.a[tail], case.u[tail], case.dy[tail], tuple(tensor[tail] for tensor in case.rows)
    exact = case.plain(torch.float64)
    for a, b in zip([*ours[:3], y], [*exact[:3], exact[0]], strict=True):
        assert error(a[tail], b) < 2**-7
