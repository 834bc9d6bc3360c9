"""Position and time encoding, input dropout, and the stack of STU layers."""

import torch
from torch import Tensor, nn

from dlrm_hstu.config import ModelConfig
from dlrm_hstu.modules.layout import SequenceLayout
from dlrm_hstu.modules.stu import STULayer
from dlrm_hstu.ops import DropoutKey, add_position_time, dropout

INPUT_SITE = 0  # dropout site of the input; layer i has site i + 1


class Transducer(nn.Module):
    """[T, D] tokens -> [T, D] contextualized tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_contextual = len(config.contextual_features)
        self.input_dropout = config.input_dropout
        self.fixed_scale_length = config.max_seq_len if config.attention_scale == "max_seq_len" else None
        self.position_table = nn.Parameter(torch.empty(config.position_buckets, config.embedding_dim))
        self.time_table = nn.Parameter(torch.empty(config.time_buckets + 1, config.embedding_dim))
        self.layers = nn.ModuleList(STULayer(config) for _ in range(config.num_layers))

    def forward(self, z: Tensor, layout: SequenceLayout, sample_index: Tensor, seed_step: tuple[int, int] | None) -> Tensor:
        """z: [T, D]. sample_index: int [B]. seed_step: keys dropout; None means evaluation."""

        def key(site: int) -> DropoutKey | None:
            return None if seed_step is None else DropoutKey(*seed_step, site)

        rows = (sample_index[layout.sample], layout.position)
        x = add_position_time(
            z,
            self.position_table,
            self.time_table,
            position=layout.position,
            history_end=layout.history_end[layout.sample],
            age=layout.age,
            contextual_seq_len=self.num_contextual,
        )
        x = dropout(x, self.input_dropout, key(INPUT_SITE), rows)
        for i, layer in enumerate(self.layers):
            x = layer(x, layout, self.fixed_scale_length or layout.max_length, key(i + 1), rows)
        return x
