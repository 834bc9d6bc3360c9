"""The kernels' random bits against the specification, bit for bit. On a CPU the kernels run in Triton's interpreter."""

import importlib
import inspect
import os

import pytest
import torch

from dlrm_hstu.ops import DropoutKey, dropout
from dlrm_hstu.ops.counter_dropout import random_bits, row_keys
from tests.batches import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
triton = pytest.importorskip("triton")
tl = importlib.import_module("triton.language")
kernels = importlib.import_module("dlrm_hstu.ops.counter_dropout.triton")
device_row_keys, device_random_bits = kernels.row_keys, kernels.random_bits

KEYS = [0, 1, 2**32 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
EDGES = [0, 1, -1, 2**31 - 1, -(2**31)]
WIDE_EDGES = [2**40 + 3, -(2**63)]
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bf16 bit patterns")],
    ),
]


@triton.jit
def _bits_kernel(out_ptr, sample_ptr, position_ptr, key: tl.int64, first_column, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    low, folded = device_row_keys(key, tl.load(sample_ptr + row), tl.load(position_ptr + row))
    tl.store(out_ptr + row * D + column, device_random_bits(low, folded, column + first_column), mask=column < D)


def names(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(sample, position): every pair of edge values."""
    edges = torch.tensor(EDGES + (WIDE_EDGES if dtype == torch.int64 else []), dtype=dtype)
    return tuple(tensor.contiguous().to(DEVICE) for tensor in torch.cartesian_prod(edges, edges).T)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("first_column", [0, 2**31 - 200])
@pytest.mark.parametrize("key", KEYS)
def test_bits_equal_the_specification(key, first_column, dtype):
    rows, columns = names(dtype), 100
    bits = torch.empty(len(rows[0]), columns, dtype=torch.int32, device=DEVICE)
    _bits_kernel[(len(bits),)](bits, *rows, kernels.signed_key(key), first_column, D=columns, BLOCK_D=128)
    assert torch.equal(bits, random_bits(row_keys(key, *rows), columns, first_column))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize(("length", "columns"), [(0, 8), (1, 1), (9, 24), (6, 1536)])
def test_dropout_equals_the_specification(length, columns, p, dtype):
    x = torch.randn(length, 2 * columns, device=DEVICE).to(dtype)[:, columns:]
    key, rows = DropoutKey(seed=3, step=2**40, site=7), (torch.arange(length, device=DEVICE) % 3, torch.arange(length, device=DEVICE))
    y = kernels.dropout_forward(x, p, key.mixed(), *rows)
    expected = dropout(x.double(), p, key, rows)
    assert y.dtype == dtype and torch.equal(y == 0, expected == 0)
    assert relative_error(y.double().cpu(), expected.cpu()) < (1e-6 if dtype == torch.float32 else 2**-8)


def test_dropped_elements_are_zero_whatever_they_were():
    x = torch.full((8, 64), float("nan"), device=DEVICE)
    row = torch.arange(8, device=DEVICE)
    y = kernels.dropout_forward(x, 0.5, 5, row, row)
    assert torch.equal(y == 0, ~y.isnan()) and 0 < y.isnan().sum() < y.numel()


def test_bad_arguments_raise():
    x, row = torch.zeros(4, 8, device=DEVICE), torch.arange(4, device=DEVICE)
    for arguments in [
        (x, 1.0, 0, row, row),
        (x, -0.1, 0, row, row),
        (x.T, 0.1, 0, row, row),
        (x, 0.1, 0, row[:3], row),
        (x, 0.1, 0, row, row.float()),
    ]:
        with pytest.raises(ValueError, match="dropout"):
            kernels.dropout_forward(*arguments)


def test_no_compile_time_constant_comes_from_a_batch():
    parameters = inspect.signature(kernels._dropout_kernel.fn).parameters
    constants = {name for name, parameter in parameters.items() if parameter.annotation is tl.constexpr}
    assert constants == {"D", "BLOCK_T", "BLOCK_D"}


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements():
    length, columns = 2**31 // 1024 + 100, 1024
    x = torch.ones(length, columns, dtype=torch.bfloat16, device=DEVICE)
    row = torch.arange(length, device=DEVICE)
    tail = slice(length - 200, None)
    y = kernels.dropout_forward(x, 0.3, 17, row, row)[tail]
    keep = random_bits(row_keys(17, row[tail], row[tail]), columns) >= kernels.keep_threshold(0.3)
    assert torch.equal(y != 0, keep)
