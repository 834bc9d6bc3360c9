"""DLRMv4: embeddings -> preprocess -> transducer -> postprocess -> head -> loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_hstu.batch import LISTEN_PLUS, Batch
from dlrm_hstu.config import ModelConfig
from dlrm_hstu.initialize import initialize_dense, initialize_tables
from dlrm_hstu.modules.embeddings import Embeddings
from dlrm_hstu.modules.head import ListenPlusHead
from dlrm_hstu.modules.layout import sequence_layout
from dlrm_hstu.modules.mlp import TokenMLP
from dlrm_hstu.modules.postprocessor import TimestampPostprocessor
from dlrm_hstu.modules.preprocessor import Preprocessor
from dlrm_hstu.modules.transducer import Transducer


@dataclass(frozen=True)
class Output:
    """loss: fp32 scalar. logits, predictions, labels, weights: fp32 [S], one a candidate."""

    loss: Tensor
    logits: Tensor
    predictions: Tensor
    labels: Tensor
    weights: Tensor


class DlrmHSTU(nn.Module):
    """The benchmark's model.

    config: shape and numerics. seed: of initial weights and dropout. device: of the dense parameters and, unless `table_device` says
    otherwise, of the tables; `table_device="meta"` leaves the tables' memory and initial rows to the sharding.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu", table_device: torch.device | str | None = None
    ):
        super().__init__()
        self.config = config
        self.seed = seed
        self.dtype = getattr(torch, config.dtype)
        self.embeddings = Embeddings(config, torch.device(table_device or device))
        with torch.device(device):
            self.preprocessor = Preprocessor(config)
            self.transducer = Transducer(config)
            self.postprocessor = TimestampPostprocessor(config)
            self.item_tower = TokenMLP(3 * config.table_dim, config.item_hidden_dim, config.embedding_dim)
            self.head = ListenPlusHead(config)
        initialize_dense(self, seed)
        if torch.device(table_device or device).type != "meta":
            initialize_tables(self.embeddings.collection, seed)

    def forward(self, batch: Batch, step: int = 0) -> Output:
        """Score a batch's candidates. step: global step, keys dropout (training mode only)."""
        layout = sequence_layout(batch, self.transducer.num_contextual)
        embedded = self.embeddings(batch)
        z = self.preprocessor(embedded, batch, layout, self.dtype)
        x = self.transducer(z, layout, batch.sample_index, (self.seed, step) if self.training else None)
        user = self.postprocessor(x.index_select(0, layout.candidate_rows), batch.candidate_time)
        towers = torch.cat([embedded.item, embedded.artist, embedded.album], dim=1)
        item = self.item_tower(towers.index_select(0, batch.candidate_item))
        logits = self.head(user.float(), item)
        labels = (batch.candidate_action & LISTEN_PLUS > 0).float()
        weights = batch.weight[layout.sample.index_select(0, layout.candidate_rows)]
        losses = binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
        loss = self.config.loss_weight * batch.loss_share * losses / weights.sum().clamp(min=1)
        return Output(loss, logits, torch.sigmoid(logits), labels, weights)
