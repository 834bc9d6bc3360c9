"""The Hopper attention kernels against the dense reference on a GPU; what they decline and how they compile, without one."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu

from dlrm_hstu.ops.hstu_attention import hopper
from dlrm_hstu.ops.hstu_attention.reference import hstu_mask
from tests.batches import relative_error

HEADS, D = 4, 128
ROUNDING = 2**-8  # of bf16
NAMES = ("out", "dq", "dk", "dv")
UGLY = [0, 1, 63, 0, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 385, 0]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def make_case(lengths, seed=0, targets=None):
    """q, k, v, dout as views with row stride 2048, int64 offsets, num_targets (random, up to `targets`) or None."""
    generator = torch.Generator("cuda").manual_seed(seed)
    wide = torch.randn(sum(lengths), 2048, device="cuda", dtype=torch.bfloat16, generator=generator)
    dout = torch.randn(sum(lengths), HEADS, D, device="cuda", dtype=torch.bfloat16, generator=generator)
    v, q, k = (wide[:, first : first + HEADS * D].unflatten(1, (HEADS, D)) for first in (512, 1024, 1536))
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    if targets is not None:
        limit = torch.tensor(lengths, device="cuda").clamp(max=targets)
        draws = torch.rand(len(lengths), device="cuda", generator=generator)
        targets = (draws * (limit + 1)).long()
    return q, k, v, dout, offsets, targets


def run_kernels(case, *, alpha=D**-0.5, max_seq_len=4096, deterministic=False, max_num_targets=None, slack=0):
    """out, dq, dk, dv; the gradients are views with row stride 2048. Everything written was NaN before."""
    q, k, v, dout, offsets, num_targets = case
    longest = int((offsets[1:] - offsets[:-1]).max()) + slack
    settings = dict(max_seq_len=max_seq_len, alpha=alpha, longest=longest, num_targets=num_targets, max_num_targets=max_num_targets)
    out = torch.full((len(q), HEADS, D), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide = torch.full((len(q), 2048), float("nan"), device="cuda", dtype=torch.bfloat16)
    dv, dq, dk = (wide[:, first : first + HEADS * D].unflatten(1, (HEADS, D)) for first in (512, 1024, 1536))
    hopper.attention_forward(q, k, v, offsets, out=out, **settings)
    hopper.attention_backward(dout, q, k, v, offsets, dq=dq, dk=dk, dv=dv, deterministic=deterministic, **settings)
    assert wide[:, :512].isnan().all(), "columns that are no gradient were written"
    return out, dq, dk, dv


def dense(case, dtype, *, alpha=D**-0.5, max_seq_len=4096, only=None):
    """out, dq, dk, dv of the sequences `only` (all if None), one after the other, in plain PyTorch at `dtype`."""
    q, k, v, dout, offsets, num_targets = case
    bounds = offsets.tolist()
    parts = [[torch.empty(0, HEADS, D, device=q.device, dtype=dtype)] for _ in NAMES]
    for b in range(len(bounds) - 1) if only is None else only:
        start, end = bounds[b], bounds[b + 1]
        if start == end:
            continue
        q_, k_, v_ = (tensor[start:end].to(dtype).detach().requires_grad_() for tensor in (q, k, v))
        length = torch.tensor([end - start], device=q.device)
        mask = hstu_mask(length, end - start, None if num_targets is None else num_targets[b : b + 1])[0]
        scores = torch.einsum("mhd,nhd->hmn", q_, k_) * alpha
        out = torch.einsum("hmn,nhd->mhd", (silu(scores) / max_seq_len).masked_fill(~mask, 0), v_)
        out.backward(dout[start:end].to(dtype))
        for part, tensor in zip(parts, (out.detach(), q_.grad, k_.grad, v_.grad), strict=True):
            part.append(tensor)
    return [torch.cat(part) for part in parts]


def check(actual, case, rows=None, only=None, **settings):
    """Errors by name, relative to each tensor's scale; raises where one passes the limit. rows: those of the sequences `only`."""
    expected, plain = (dense(case, dtype, only=only, **settings) for dtype in (torch.float32, torch.bfloat16))
    errors = {}
    for name, a, e, p in zip(NAMES, actual, expected, plain, strict=True):
        a = a if rows is None else a[rows]
        errors[name] = relative_error(a.float().cpu(), e.cpu())
        limit = (2 if name == "out" else 5) * relative_error(p.float().cpu(), e.cpu()) + ROUNDING
        assert errors[name] <= limit, f"{name}: error {errors[name]:.1e}, limit {limit:.1e}"
    return errors


def rows_of(offsets, only):
    bounds = offsets.tolist()
    return torch.cat([torch.arange(bounds[b], bounds[b + 1], device="cuda") for b in only])


def check_poisoned(lengths, poison, seed=0, targets=None, **settings):
    """Every second sequence holds `poison` in q, k, v and dout; the others must be right all the same."""
    case = make_case(lengths, seed, targets)
    clean = range(0, len(lengths), 2)
    bad = rows_of(case[4], range(1, len(lengths), 2))
    for tensor in case[:4]:
        tensor[bad] = poison
    return check(run_kernels(case, **settings), case, rows_of(case[4], clean), clean)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("targets", [None, 1, 40, 1000])
@pytest.mark.parametrize("lengths", [UGLY, [1], [65], [700]], ids=["ugly", "1", "65", "700"])
def test_equals_the_reference(lengths, targets, deterministic):
    case = make_case(lengths, targets=targets)
    check(run_kernels(case, deterministic=deterministic, slack=300), case)


@pytest.mark.gpu
@needs_hopper
def test_at_most_one_target_is_causal():
    case = make_case(UGLY, targets=1)
    known = run_kernels(case, max_num_targets=1, deterministic=True)
    causal = run_kernels((*case[:5], None), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(known, causal, strict=True))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("targets", [None, 40])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_in_one_sequence_stays_there(poison, targets, deterministic):
    """Tiles of a sequence's end reach into the next sequence: 0 * NaN in a product would spread it."""
    lengths = [65, 10, 1, 200, 128, 3, 0, 64, 333, 1, 127, 700, 385, 129, 30, 5]
    check_poisoned(lengths, poison, targets=targets, deterministic=deterministic)


@pytest.mark.gpu
@needs_hopper
def test_many_random_sequences_and_repeats_are_bitwise_equal():
    lengths = torch.randint(0, 1500, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    case = make_case(lengths)
    first = run_kernels(case, deterministic=True)
    check(first, case)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run_kernels(case, deterministic=True), strict=True))
        out, dq, dk, dv = run_kernels(case)
        assert all(torch.equal(a, b) for a, b in zip((first[0], *first[2:]), (out, dk, dv), strict=True))


@pytest.mark.gpu
@needs_hopper
def test_offsets_may_be_int32_and_inputs_contiguous():
    case = make_case(UGLY)
    views = run_kernels(case, deterministic=True)
    dense_case = (*(tensor.contiguous() for tensor in case[:4]), case[4].to(torch.int32), None)
    assert all(torch.equal(a, b) for a, b in zip(views, run_kernels(dense_case, deterministic=True), strict=True))


@pytest.mark.gpu
@needs_hopper
def test_rows_beyond_two_to_the_31_elements():
    lengths = [2048] * 520  # 1,064,960 rows of 2048
    case = make_case(lengths)
    check(run_kernels(case), case, rows_of(case[4], [0, 519]), [0, 519])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_launches_nothing(lengths, monkeypatch):
    monkeypatch.setattr(hopper, "_descriptor", None)
    case = make_case(lengths)
    settings = dict(max_seq_len=8, alpha=1.0, longest=0)
    assert hopper.attention_forward(*case[:3], case[4], **settings).shape == (0, HEADS, D)
    gradients = hopper.attention_backward(case[3], *case[:3], case[4], **settings)
    assert [gradient.shape for gradient in gradients] == [(0, HEADS, D)] * 3


@pytest.mark.gpu
@needs_hopper
def test_what_is_declined_says_why():
    q, k, v, _, offsets, _ = make_case([5])
    assert hopper.supports(q, k, v, max_num_targets=None, longest=5) is None
    assert "windows" in hopper.supports(q, k, v, max_attn_len=5)
    assert "contextual" in hopper.supports(q, k, v, contextual_seq_len=2)
    assert "bfloat16" in hopper.supports(q.float(), k, v)
    assert "k has heads 64 wide" in hopper.supports(q, k[..., :64], v)
    assert "multiples of 16 bytes" in hopper.supports(q, k, torch.randn(5, 513, device="cuda").bfloat16()[:, 1:].unflatten(1, (HEADS, D)))
    with pytest.raises(ValueError, match="windows; use the portable kernels"):
        hopper.attention_forward(q, k, v, offsets, max_seq_len=8, alpha=1.0, longest=5, max_attn_len=3)


def test_other_devices_are_declined_without_triton():
    q = torch.zeros(3, HEADS, D, dtype=torch.bfloat16)
    assert "needs an NVIDIA GPU; the tensors are on cpu" in hopper.supports(q, q, q)


def kernels():
    """name -> (kernel, types of its runtime arguments, constants)."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from dlrm_hstu.ops.hstu_attention.hopper_backward import key_kernel
    from dlrm_hstu.ops.hstu_attention.hopper_forward import forward_kernel
    from dlrm_hstu.ops.hstu_attention.hopper_query import query_kernel

    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={}, rank=2)"
    tile, keys = (f"tensordesc<bf16[{rows},128],{layout.format(16)}>" for rows in (64, 128))
    sums = f"tensordesc<fp32[64,64],{layout.format(32)}>"
    ints = ["*i64", "*i64", "*i32"]  # offsets, num_targets, counter
    common = dict(H=HEADS, RING=2, REGISTERS=240, TARGETS=False)
    return {
        "forward": (
            forward_kernel,
            [tile, keys, keys, "*bf16", *ints, "i32", "i32", "i32", "fp32", "fp32"],
            common | dict(PERSISTENT=True, UNROLL=True),
        ),
        "key": (
            key_kernel,
            [tile] * 4 + [sums, "*bf16", "*bf16", *ints, "i32", "i32", "i32", "i32", "fp32", "fp32", "fp32"],
            common | dict(FUSED=True, PERSISTENT=True),
        ),
        "query": (query_kernel, [tile] * 4 + ["*bf16", *ints[:2], "i32", "i32", "fp32", "fp32"], common),
    }


interpreted = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(interpreted, reason="this process interprets kernels; test_compilation runs it in one that compiles")


@pytest.mark.skipif(not interpreted, reason="this process compiles kernels itself")
def test_compilation():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "sm_90_without or compile_time"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr


@compiled
@pytest.mark.parametrize("name", ["forward", "key", "query"])
def test_nothing_of_a_batch_is_a_compile_time_constant(name):
    kernel, _, _ = kernels()[name]
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    assert constants <= {"H", "RING", "REGISTERS", "FUSED", "TARGETS", "PERSISTENT", "UNROLL"}
    counts = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    assert counts == {parameter.name for parameter in kernel.params} & {"items", "items_per_head"}


@compiled
@pytest.mark.parametrize("name", ["forward", "key", "query"])
def test_compiles_for_sm_90_without_a_gpu(name, monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, types, constants = kernels()[name]
    runtime = [argument for argument in kernel.arg_names if argument not in constants]
    types = dict(zip(runtime, types, strict=True))
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constexprs, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    assert ("cp.reduce.async.bulk.tensor" in ptx) == (name == "key")
