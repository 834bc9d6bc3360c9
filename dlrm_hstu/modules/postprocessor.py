"""From candidate rows of the transducer to user embeddings."""

import torch
from torch import Tensor, nn

from dlrm_hstu.config import ModelConfig
from dlrm_hstu.modules.mlp import LayerNorm, Linear

PERIODS = ((3600, 24), (86400, 7))  # seconds a unit, units a cycle: hour of the day, day of the week
TWO_PI = 2 * 3.14  # the benchmark's value


class TimestampPostprocessor(nn.Module):
    """LN(W [candidate; cos and sin of its hour and weekday] + b)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.time_combiner = Linear(config.embedding_dim + 2 * len(PERIODS), config.embedding_dim)
        self.norm = LayerNorm(config.embedding_dim)

    def forward(self, candidate: Tensor, time: Tensor) -> Tensor:
        """candidate: [S, D]. time: integer [S], query time in seconds. Returns [S, D] in candidate's dtype."""
        features = []
        for seconds, units in PERIODS:
            angle = (time // seconds % units).float() / units * TWO_PI
            features += [torch.cos(angle), torch.sin(angle)]
        features = torch.stack(features, dim=1).to(candidate.dtype)
        return self.norm(self.time_combiner(torch.cat([candidate, features], dim=1)))
