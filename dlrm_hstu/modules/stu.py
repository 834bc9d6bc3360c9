"""One Sequential Transduction Unit."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from dlrm_hstu.config import ModelConfig
from dlrm_hstu.modules.layout import SequenceLayout
from dlrm_hstu.modules.mlp import LayerNorm
from dlrm_hstu.ops import DropoutKey, hstu_attention, norm_gate_dropout

EPS = 1e-6


class STULayer(nn.Module):
    """out = x + y W_out, y = dropout([u, a, LN(a) * u]), a = attention(q, k, v), [silu^-1(u), v, q, k] = LN(x) W_uvqk + b.

    Shapes: uvqk_weight [D, H * (2 * hidden_dim + 2 * attention_dim)], columns in the order u, v, q, k; output_weight
    [3 * H * hidden_dim, D], row blocks for u, a, LN(a) * u.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, heads = config.embedding_dim, config.num_heads
        self.num_heads = heads
        self.hidden_dim, self.attention_dim = config.hidden_dim, config.attention_dim
        self.split = [heads * config.hidden_dim] * 2 + [heads * config.attention_dim] * 2
        self.dropout = config.layer_dropout
        self.input_norm = LayerNorm(width, EPS)
        self.uvqk_weight = nn.Parameter(torch.empty(width, sum(self.split)))
        self.uvqk_bias = nn.Parameter(torch.zeros(sum(self.split)))
        self.output_norm = LayerNorm(heads * config.hidden_dim, EPS)
        self.output_weight = nn.Parameter(torch.empty(3 * heads * config.hidden_dim, width))

    def forward(self, x: Tensor, layout: SequenceLayout, scale_length: int, key: DropoutKey | None, rows: tuple[Tensor, Tensor]) -> Tensor:
        """x: [T, D]. scale_length: what divides the scores. key, rows: dropout, see `ops.counter_dropout`. Returns [T, D]."""
        uvqk = torch.addmm(self.uvqk_bias.to(x.dtype), self.input_norm(x), self.uvqk_weight.to(x.dtype))
        u, v, q, k = uvqk.split(self.split, dim=1)
        attention = hstu_attention(
            q.unflatten(1, (self.num_heads, self.attention_dim)),
            k.unflatten(1, (self.num_heads, self.attention_dim)),
            v.unflatten(1, (self.num_heads, self.hidden_dim)),
            layout.offsets,
            max_seq_len=scale_length,
            alpha=self.attention_dim**-0.5,
            num_targets=layout.num_targets,
        ).flatten(1)
        norm = self.output_norm
        y = norm_gate_dropout(attention, silu(u), norm.weight, norm.bias, eps=norm.eps, p=self.dropout, key=key, rows=rows)
        return torch.addmm(x, y, self.output_weight.to(x.dtype))
