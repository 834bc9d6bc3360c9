"""One STU layer as one op, so that its backward writes every gradient once and its activations are recomputed by choice."""

from dataclasses import dataclass

from torch import Tensor

from dlrm_hstu.ops.backends import pick_backend
from dlrm_hstu.ops.counter_dropout import DropoutKey
from dlrm_hstu.ops.stu_layer.reference import stu_layer_reference

RECOMPUTE = ("none", "uvqk")


@dataclass(frozen=True)
class STUWeights:
    """fp32. input_norm_weight, input_norm_bias: [D]. uvqk: [D, H * (2 * hidden + 2 * attention)], columns u, v, q, k; uvqk_bias: its
    columns. output_norm_weight, output_norm_bias: [H * hidden]. output: [3 * H * hidden, D], row blocks u, a, LN(a) * u.
    """

    input_norm_weight: Tensor
    input_norm_bias: Tensor
    uvqk: Tensor
    uvqk_bias: Tensor
    output_norm_weight: Tensor
    output_norm_bias: Tensor
    output: Tensor


@dataclass(frozen=True)
class STUSettings:
    """num_heads, attention_dim, hidden_dim: H, q/k width and u/v width of a head. eps: of both norms. dropout: drop probability.
    recompute: what the backward makes again instead of the forward keeping it: "none", or "uvqk" with the normed input before it.
    """

    num_heads: int
    attention_dim: int
    hidden_dim: int
    eps: float
    dropout: float
    recompute: str = "none"

    @property
    def split(self) -> list[int]:
        """Columns of u, v, q and k."""
        return [self.num_heads * self.hidden_dim] * 2 + [self.num_heads * self.attention_dim] * 2


@dataclass(frozen=True)
class STUBatch:
    """offsets: int64 [B + 1]. num_targets: int64 [B]. rows: (sample, position), integer [T] each, and key: of the dropout mask, None in
    evaluation. Host numbers: scale_length divides the scores, longest bounds the lengths, max_num_targets bounds num_targets.
    """

    offsets: Tensor
    num_targets: Tensor
    rows: tuple[Tensor, Tensor]
    key: DropoutKey | None
    scale_length: int
    longest: int
    max_num_targets: int


def stu_layer(x: Tensor, weights: STUWeights, settings: STUSettings, batch: STUBatch, *, backend: str = "auto") -> Tensor:
    """out = x + y W_output, y = dropout([u, a, LN(a) * u]), a = attention(q, k, v), u = silu(u'), [u', v, q, k] = LN(x) W_uvqk + b.

    x: [T, D]. Returns [T, D] in x's dtype. "auto" takes the kernels on a GPU and the reference elsewhere. Raises ValueError on an unknown
    backend. Formula: docs/model.md.
    """
    return pick_backend("stu_layer", _BACKENDS, backend, x)(x, weights, settings, batch)


def _kernels(x: Tensor, weights: STUWeights, settings: STUSettings, batch: STUBatch) -> Tensor:
    from dlrm_hstu.ops.stu_layer.fused import stu_layer_fused  # brings triton

    return stu_layer_fused(x, weights, settings, batch)


_BACKENDS = {"reference": stu_layer_reference, "triton": _kernels}
