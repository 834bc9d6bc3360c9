"""The task head: does the user listen to at least half of the candidate?"""

from torch import Tensor, nn

from dlrm_hstu.config import ModelConfig
from dlrm_hstu.modules.mlp import Linear, SwishLayerNorm


class ListenPlusHead(nn.Module):
    """logit = w2 . SLN(W1 (user * item) + b1) + b2, in fp32."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.inner = Linear(config.embedding_dim, config.head_hidden_dim)
        self.gate = SwishLayerNorm(config.head_hidden_dim)
        self.outer = Linear(config.head_hidden_dim, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """user, item: fp32 [S, D]. Returns fp32 [S]."""
        return self.outer(self.gate(self.inner(user * item))).squeeze(1)
