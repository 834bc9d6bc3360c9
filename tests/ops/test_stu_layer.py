"""The fused layer against its reference: output and every gradient, on a CPU through the interpreter and on a GPU."""

import pytest
import torch

from dlrm_hstu.ops.counter_dropout import DropoutKey
from dlrm_hstu.ops.stu_layer import STUBatch, STUSettings, STUWeights, stu_layer
from tests.batches import relative_error

NAMES = ("out", "dx", "input_norm_weight", "input_norm_bias", "uvqk", "uvqk_bias", "output_norm_weight", "output_norm_bias", "output")


def make_weights(width: int, settings: STUSettings, device: str) -> STUWeights:
    generator = torch.Generator().manual_seed(1)
    columns = settings.split
    shapes = ((width,), (width,), (width, sum(columns)), (sum(columns),), (columns[0],), (columns[0],), (3 * columns[0], width))
    tensors = [torch.randn(shape, generator=generator) * (2 / width**0.5 if len(shape) == 2 else 0.3) for shape in shapes]
    tensors[0] += 1
    tensors[4] += 1
    return STUWeights(*(tensor.to(device).requires_grad_() for tensor in tensors))


def make_batch(lengths: list[int], key: DropoutKey | None, device: str) -> STUBatch:
    counts = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    position = torch.arange(len(sample)) - offsets[sample]
    longest = max(lengths)
    targets = counts.clamp(max=1)
    return STUBatch(offsets.to(device), targets.to(device), (sample.to(device), position.to(device)), key, max(longest, 1), longest, 1)


def run(backend: str, x, dout, weights: STUWeights, settings: STUSettings, batch: STUBatch, dtype=torch.float32):
    leaf = x.to(dtype).requires_grad_()
    out = stu_layer(leaf, weights, settings, batch, backend=backend)
    leaves = [leaf, *(getattr(weights, name) for name in weights.__dataclass_fields__)]
    return [tensor.detach().float().cpu() for tensor in (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))]


@pytest.mark.parametrize("recompute", ["none", "uvqk"])
@pytest.mark.parametrize("key", [None, DropoutKey(1, 2, 3)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the test below")
def test_equals_the_reference_in_fp32(recompute, key):
    settings = STUSettings(2, 16, 16, 1e-6, 0.3, recompute)
    weights, batch = make_weights(32, settings, "cpu"), make_batch([5, 0, 1, 17, 33], key, "cpu")
    x, dout = torch.randn(56, 32) * 2, torch.randn(56, 32)
    expected, actual = (run(backend, x, dout, weights, settings, batch) for backend in ("reference", "triton"))
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert relative_error(a, b) < 1e-5, name


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "uvqk"])
@pytest.mark.parametrize("key", [None, DropoutKey(1, 2, 3)])
def test_errs_no_more_than_plain_bf16(recompute, key):
    settings = STUSettings(4, 128, 128, 1e-6, 0.1, recompute)
    weights, batch = make_weights(512, settings, "cuda"), make_batch([300, 0, 1, 511, 63, 64, 65, 777], key, "cuda")
    tokens = int(batch.offsets[-1])
    x, dout = (torch.randn(tokens, 512, device="cuda") for _ in range(2))
    exact = run("reference", x, dout, weights, settings, batch)
    plain = run("reference", x, dout, weights, settings, batch, torch.bfloat16)
    ours = run("triton", x, dout, weights, settings, batch, torch.bfloat16)
    for name, e, p, o in zip(NAMES, exact, plain, ours, strict=True):
        factor = 2 if name == "out" else 5
        assert (o - e).norm() <= factor * (p - e).norm() + 1e-4 * e.norm(), name


def test_an_unknown_backend_lists_what_there_is():
    settings = STUSettings(2, 16, 16, 1e-6, 0.0)
    with pytest.raises(ValueError, match="reference, triton"):
        stu_layer(torch.zeros(1, 32), make_weights(32, settings, "cpu"), settings, make_batch([1], None, "cpu"), backend="cuda")
