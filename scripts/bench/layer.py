"""Attention and whole STU layers: `python -m scripts.bench.layer [--json PATH]`. Reports no time on a red check.

FLOPs are counted causally: attention forward 2 * H * sum(L^2) * d, its backward 2.5 times that.
"""

import time

import torch

from dlrm_hstu.ops.counter_dropout import DropoutKey
from dlrm_hstu.ops.hstu_attention import hstu_attention
from dlrm_hstu.ops.stu_layer import STUBatch, STUSettings, STUWeights, stu_layer
from scripts.bench.harness import arguments, ceilings, check, relative_error, time_ms, write_results

HEADS, HEAD_DIM, WIDTH = 4, 128, 512
SETTINGS = STUSettings(HEADS, HEAD_DIM, HEAD_DIM, 1e-6, 0.1)


def lengths_of(batch: int, length: int, ragged: bool) -> torch.Tensor:
    """int64 [batch]: all `length`, or spread evenly over +-50 % of it, shuffled."""
    if not ragged:
        return torch.full((batch,), length)
    spread = torch.linspace(0.5 * length, 1.5 * length, batch).long()
    return spread[torch.randperm(batch, generator=torch.Generator().manual_seed(0))]


def batch_of(lengths: torch.Tensor, key: DropoutKey | None) -> STUBatch:
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda()
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(sample)) - offsets.cpu()[sample]
    longest = int(lengths.max())
    return STUBatch(offsets, torch.ones_like(lengths).cuda(), (sample.cuda(), position.cuda()), key, longest, longest, 1)


def weights(dtype=torch.float32) -> STUWeights:
    torch.manual_seed(0)
    columns = HEADS * HEAD_DIM
    shapes = ((WIDTH,), (WIDTH,), (WIDTH, 4 * columns), (4 * columns,), (columns,), (columns,), (3 * columns, WIDTH))
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) * (0.05 if len(shape) == 2 else 0.1) for shape in shapes]
    tensors[0] += 1
    tensors[4] += 1
    return STUWeights(*(tensor.requires_grad_() for tensor in tensors))


def gradients(x: torch.Tensor, layer: STUWeights, batch: STUBatch, backend: str, dout: torch.Tensor, dtype: torch.dtype) -> list:
    leaf = x.to(dtype).requires_grad_()
    tensors = [leaf, *(getattr(layer, name) for name in layer.__dataclass_fields__)]
    out = stu_layer(leaf, layer, SETTINGS, batch, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]


def gate() -> None:
    """Kernels against the fp32 reference, beside the bf16 reference: ragged, with an empty and a one-token sequence."""
    batch = batch_of(torch.tensor([300, 0, 1, 511, 64, 65, 777]), DropoutKey(1, 2, 3))
    layer, tokens = weights(), int(batch.offsets[-1])
    x, dout = (torch.randn(tokens, WIDTH, device="cuda") for _ in range(2))
    exact = gradients(x, layer, batch, "reference", dout, torch.float32)
    plain = gradients(x, layer, batch, "reference", dout, torch.bfloat16)
    ours = gradients(x, layer, batch, "triton", dout, torch.bfloat16)
    names = ["out", "dx", *layer.__dataclass_fields__]
    factor = {name: 2 if name == "out" else 5 for name in names}
    limits = {name: factor[name] * relative_error(b, a) + 1e-4 for name, a, b in zip(names, exact, plain, strict=True)}
    check("stu_layer", {name: relative_error(b, a) for name, a, b in zip(names, exact, ours, strict=True)}, limits)


def attention_rows(batch_size: int, length: int) -> list[dict]:
    batch = batch_of(lengths_of(batch_size, length, False), None)
    tokens = batch_size * length
    uvqk = torch.randn(tokens, 4 * WIDTH, device="cuda", dtype=torch.bfloat16)
    v, q, k = (uvqk[:, i * WIDTH : (i + 1) * WIDTH].unflatten(1, (HEADS, HEAD_DIM)).requires_grad_() for i in (1, 2, 3))
    dout = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def forward():
        return hstu_attention(q, k, v, batch.offsets, max_seq_len=length, alpha=HEAD_DIM**-0.5, num_targets=batch.num_targets)

    flops = 2 * HEADS * batch_size * length**2 * HEAD_DIM
    out = forward()
    times = {
        "fwd": (time_ms(forward), flops),
        "bwd": (time_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)), 2.5 * flops),
    }
    return [
        {"name": f"attention_{name}_{batch_size}x{length}", **ms, "unit": "ms", "tflops": round(work / ms["p50"] / 1e9, 1)}
        for name, (ms, work) in times.items()
    ]


def layer_row(name: str, batch_size: int, length: int, ragged: bool) -> dict:
    lengths = lengths_of(batch_size, length, ragged)
    batch, layer = batch_of(lengths, DropoutKey(1, 2, 3)), weights()
    x, dout = (torch.randn(int(lengths.sum()), WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ms = time_ms(lambda: gradients(x, layer, batch, "triton", dout, torch.bfloat16), repetitions=8)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    return {"name": name, **ms, "unit": "ms", "sum_squared_lengths": int((lengths**2).sum()), "peak_gib": round(peak, 2)}


def main() -> None:
    parsed = arguments(__doc__)
    start = time.perf_counter()
    gate()
    first_step_s = round(time.perf_counter() - start, 1)
    rows = [{"name": "first_step_s", "p10": first_step_s, "p50": first_step_s, "p90": first_step_s, "unit": "s"}]
    for shape in ((1024, 2663), (256, 4086), (1024, 4086)):
        rows += attention_rows(*shape)
        torch.cuda.empty_cache()
    for name, shape, ragged in (
        ("layer_1024x2663", (1024, 2663), False),
        ("layer_ragged_1024x2663", (1024, 2663), True),
        ("layer_1024x4086", (1024, 4086), False),
    ):
        rows.append(layer_row(name, *shape, ragged))
        torch.cuda.empty_cache()
    write_results(rows, parsed.json, ceilings())


if __name__ == "__main__":
    main()
