"""Embedding tables, through TorchRec: sharding them changes the wrapper and not the model."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from dlrm_hstu.batch import Batch
from dlrm_hstu.config import ModelConfig


@dataclass(frozen=True)
class Embedded:
    """item, artist, album: fp32 [I, table_dim], rows of the batch's distinct triples. contextual: fp32 [C, B, table_dim]."""

    item: Tensor
    artist: Tensor
    album: Tensor
    contextual: Tensor


class Embeddings(nn.Module):
    """One lookup a table and distinct row. `device`: "meta" leaves the weights to whoever shards them."""

    def __init__(self, config: ModelConfig, device: torch.device):
        super().__init__()
        self.contextual_features = tuple(config.contextual_features)
        self.table_dim = config.table_dim
        tables = ("item_id", "artist_id", "album_id", *self.contextual_features)
        self.collection = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=t, num_embeddings=config.table_rows[t], embedding_dim=config.table_dim, feature_names=[t])
                for t in tables
            ],
            device=device,
        )
        self.tables = tables

    def forward(self, batch: Batch) -> Embedded:
        ids = [batch.item_ids, batch.artist_ids, batch.album_ids, *batch.contextual_ids]
        lengths = torch.tensor([len(values) for values in ids], dtype=torch.int64).to(batch.item_ids.device, non_blocking=True)
        features = KeyedJaggedTensor(keys=list(self.tables), values=torch.cat(ids).long(), lengths=lengths)
        rows = self.collection(features)
        contextual = [rows[name].values() for name in self.contextual_features]
        return Embedded(
            item=rows["item_id"].values(),
            artist=rows["artist_id"].values(),
            album=rows["album_id"].values(),
            contextual=torch.stack(contextual) if contextual else rows["item_id"].values().new_zeros(0, batch.batch_size, self.table_dim),
        )
