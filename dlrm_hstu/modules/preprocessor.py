"""From embeddings to the transducer's tokens.

All work before the position encoding is a function of the item or of the action bits, so it is done once for each distinct item and
each of the few action patterns, then gathered.
"""

import torch
from torch import Tensor, nn

from dlrm_hstu.batch import LIKE, LISTEN_PLUS, SKIP, Batch
from dlrm_hstu.config import ModelConfig
from dlrm_hstu.modules.embeddings import Embedded
from dlrm_hstu.modules.layout import SequenceLayout
from dlrm_hstu.modules.mlp import TokenMLP

ACTION_BITS = (LISTEN_PLUS, LIKE, SKIP)


class Preprocessor(nn.Module):
    """z(token) = content(item) + additional(artist, album) + action(bits); a contextual token is a linear map of its embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, hidden = config.embedding_dim, config.preprocessor_hidden_dim
        num_contextual = len(config.contextual_features)
        self.contextual_weight = nn.Parameter(torch.empty(num_contextual, config.table_dim, width))
        self.contextual_bias = nn.Parameter(torch.zeros(num_contextual, width))
        self.content = TokenMLP(config.table_dim, hidden, width)
        self.additional = TokenMLP(2 * config.table_dim, hidden, width)
        self.action = TokenMLP(len(ACTION_BITS) * config.action_dim, hidden, width)
        self.action_table = nn.Parameter(torch.empty(len(ACTION_BITS), config.action_dim))
        self.target_action = nn.Parameter(torch.empty(1, len(ACTION_BITS) * config.action_dim))

    def forward(self, embedded: Embedded, batch: Batch, layout: SequenceLayout, dtype: torch.dtype) -> Tensor:
        """[T, D] in `dtype`, tokens in layout order."""
        item = self.content(embedded.item.to(dtype))
        item = item + self.additional(torch.cat([embedded.artist, embedded.album], dim=1).to(dtype))
        action = self.action(self._action_rows().to(dtype))
        event = item.index_select(0, batch.event_item) + action.index_select(0, batch.event_action.int())
        candidate = item.index_select(0, batch.candidate_item) + action[-1]
        contextual = torch.baddbmm(
            self.contextual_bias.to(dtype)[:, None], embedded.contextual.to(dtype), self.contextual_weight.to(dtype)
        )  # [C, B, D]
        rows = torch.cat([contextual.transpose(0, 1).flatten(0, 1), event, candidate])
        return rows.index_select(0, layout.source)

    def _action_rows(self) -> Tensor:
        """[2^bits + 1, bits * action_dim]: what each action pattern feeds its MLP, and last the candidates' learned row."""
        pattern = torch.arange(2 ** len(ACTION_BITS), device=self.action_table.device)
        has_bit = (pattern[:, None] & torch.tensor(ACTION_BITS, device=pattern.device)) > 0
        return torch.cat([(has_bit[:, :, None] * self.action_table).flatten(1), self.target_action])
