"""What an STU layer feeds its output projection: [u, a, LN(a) * u], dropped out."""

import torch
from torch import Tensor

from dlrm_hstu.ops.counter_dropout import DropoutKey, dropout
from dlrm_hstu.ops.layer_norm import layer_norm


def norm_gate_dropout(
    attention: Tensor, u: Tensor, weight: Tensor, bias: Tensor, *, eps: float, p: float, key: DropoutKey | None, rows: tuple[Tensor, Tensor]
) -> Tensor:
    """y = dropout([u, a, LN(a) * u]).

    attention, u: [T, D]. weight, bias: fp32 [D], of the norm. p, key, rows: as in `counter_dropout.dropout`. Returns [T, 3 * D] in u's
    dtype; one mask element for each of the 3 * D columns.
    """
    gated = layer_norm(attention, weight, bias, eps) * u
    return dropout(torch.cat([u, attention, gated], dim=1), p, key, rows)
