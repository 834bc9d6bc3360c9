"""HSTU attention: pointwise SiLU scores over a jagged batch, no softmax."""

from torch import Tensor

from dlrm_hstu.ops.backends import pick_backend
from dlrm_hstu.ops.hstu_attention.reference import hstu_attention_reference


def _kernels(backend: str):
    def run(*tensors: Tensor, **settings) -> Tensor:
        from dlrm_hstu.ops.hstu_attention.kernels import hstu_attention_kernels  # brings triton

        return hstu_attention_kernels(*tensors, backend=backend, **settings)

    return run


_BACKENDS = {
    "reference": hstu_attention_reference,
    "kernels": _kernels("auto"),
    "hopper": _kernels("hopper"),
    "triton": _kernels("triton"),
}


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_seq_len: int,
    alpha: float,
    num_targets: Tensor | None = None,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    backend: str = "auto",
) -> Tensor:
    """out_i = sum_j mask_ij * silu(alpha * q_i . k_j) / max_seq_len * v_j, within each sequence and head.

    q, k: [T, H, d_qk]. v: [T, H, d_v]. offsets: int64 [B + 1], offsets[0] = 0. Returns [T, H, d_v] in v's dtype.
    max_seq_len: divides the scores; at least the longest length. num_targets: [B], the last tokens of each sequence that see all history
    and themselves but not each other. contextual_seq_len: leading tokens that form one bidirectional block. max_attn_len: window in
    tokens, 0 for none. min_full_attn_seq_len: newest history tokens whose window is unlimited. backend: "reference", "kernels" (on
    Hopper its own where they support the call, else the portable ones), "hopper", "triton"; "auto" takes the kernels on a GPU. Raises
    ValueError on an unknown backend, one that cannot run the call, or shapes that do not fit.
    Formula: Zhai et al., "Actions Speak Louder than Words", 2024, with masks as in docs/model.md.
    """
    if q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"hstu_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: tokens, heads and q/k width must agree"
        )
    if min_full_attn_seq_len and not max_attn_len:
        raise ValueError(f"hstu_attention: min_full_attn_seq_len={min_full_attn_seq_len} widens a window; set max_attn_len too")
    implementation = pick_backend("hstu_attention", _BACKENDS, backend, q)
    return implementation(
        q,
        k,
        v,
        offsets,
        max_seq_len=max_seq_len,
        alpha=alpha,
        num_targets=num_targets,
        contextual_seq_len=contextual_seq_len,
        max_attn_len=max_attn_len,
        min_full_attn_seq_len=min_full_attn_seq_len,
    )
