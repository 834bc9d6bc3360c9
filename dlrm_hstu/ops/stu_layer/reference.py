"""One STU layer of the ops' references: the specification."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from dlrm_hstu.ops.hstu_attention import hstu_attention
from dlrm_hstu.ops.layer_norm import layer_norm
from dlrm_hstu.ops.norm_gate_dropout import norm_gate_dropout


def stu_layer_reference(x: Tensor, weights, settings, batch) -> Tensor:
    """See `dlrm_hstu.ops.stu_layer`; weights are cast to x's dtype."""
    normed = layer_norm(x, weights.input_norm_weight, weights.input_norm_bias, settings.eps)
    uvqk = torch.addmm(weights.uvqk_bias.to(x.dtype), normed, weights.uvqk.to(x.dtype))
    u, v, q, k = uvqk.split(settings.split, dim=1)
    attention = hstu_attention(
        q.unflatten(1, (settings.num_heads, settings.attention_dim)),
        k.unflatten(1, (settings.num_heads, settings.attention_dim)),
        v.unflatten(1, (settings.num_heads, settings.hidden_dim)),
        batch.offsets,
        max_seq_len=batch.scale_length,
        alpha=settings.attention_dim**-0.5,
        num_targets=batch.num_targets,
        backend="reference",
    ).flatten(1)
    y = norm_gate_dropout(
        attention,
        silu(u),
        weights.output_norm_weight,
        weights.output_norm_bias,
        eps=settings.eps,
        p=settings.dropout,
        key=batch.key,
        rows=batch.rows,
    )
    return torch.addmm(x, y, weights.output.to(x.dtype))
