"""One Sequential Transduction Unit."""

import torch
from torch import Tensor, nn

from dlrm_hstu.config import ModelConfig
from dlrm_hstu.modules.layout import SequenceLayout
from dlrm_hstu.modules.mlp import LayerNorm
from dlrm_hstu.ops import DropoutKey
from dlrm_hstu.ops.stu_layer import STUBatch, STUSettings, STUWeights, stu_layer

EPS = 1e-6


class STULayer(nn.Module):
    """The parameters of one layer; the arithmetic is `ops.stu_layer`.

    Shapes: uvqk_weight [D, H * (2 * hidden_dim + 2 * attention_dim)], columns in the order u, v, q, k; output_weight
    [3 * H * hidden_dim, D], row blocks for u, a, LN(a) * u.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.embedding_dim
        self.settings = STUSettings(config.num_heads, config.attention_dim, config.hidden_dim, EPS, config.layer_dropout, config.recompute)
        self.backend = config.kernels
        columns = self.settings.split
        self.input_norm = LayerNorm(width, EPS)
        self.uvqk_weight = nn.Parameter(torch.empty(width, sum(columns)))
        self.uvqk_bias = nn.Parameter(torch.zeros(sum(columns)))
        self.output_norm = LayerNorm(columns[0], EPS)
        self.output_weight = nn.Parameter(torch.empty(3 * columns[0], width))

    def forward(self, x: Tensor, layout: SequenceLayout, scale_length: int, key: DropoutKey | None, rows: tuple[Tensor, Tensor]) -> Tensor:
        """x: [T, D]. scale_length: what divides the scores. key, rows: dropout, see `ops.counter_dropout`. Returns [T, D]."""
        weights = STUWeights(
            self.input_norm.weight,
            self.input_norm.bias,
            self.uvqk_weight,
            self.uvqk_bias,
            self.output_norm.weight,
            self.output_norm.bias,
            self.output_weight,
        )
        batch = STUBatch(layout.offsets, layout.num_targets, rows, key, scale_length, layout.max_length, layout.max_num_targets)
        return stu_layer(x, weights, self.settings, batch, backend=self.backend)
