"""Initial weights as a function of (seed, name, row, column): the same at any world size and under any sharding plan."""

import hashlib
import math

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection

from dlrm_hstu.ops.counter_dropout.reference import random_bits, row_keys

_CHUNK_ELEMENTS = 1 << 24


def name_key(seed: int, name: str) -> int:
    """A 64-bit key for one named tensor of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")


@torch.no_grad()
def initialize_dense(model: nn.Module, seed: int) -> None:
    """Fill every dense parameter of a DlrmHSTU. Biases are 0 and norms' weights 1 as built; the rest follows the benchmark."""
    for name, parameter in model.named_parameters():
        if name.startswith("embeddings.") or parameter.dim() < 2 or name.endswith("contextual_bias"):
            continue
        generator = torch.Generator().manual_seed(name_key(seed, name) >> 1)
        values = torch.empty(parameter.shape)
        _fill(name, values, generator)
        parameter.copy_(values)


def _fill(name: str, values: Tensor, generator: torch.Generator) -> None:
    if name.endswith("contextual_weight"):
        values.normal_(0, math.sqrt(2 / (values.shape[1] + values.shape[2])), generator=generator)
    elif name.endswith(("action_table", "target_action")):
        values.normal_(0, 0.1, generator=generator)
    elif name.endswith("position_table"):
        bound = math.sqrt(1 / values.shape[0])
        values.uniform_(-bound, bound, generator=generator)
    elif name.endswith("time_table"):
        bound = math.sqrt(1 / (values.shape[0] - 1))
        values.uniform_(-bound, bound, generator=generator)
    elif name.startswith(("preprocessor.", "postprocessor.")):
        nn.init.xavier_normal_(values, generator=generator)
    else:
        nn.init.xavier_uniform_(values, generator=generator)


@torch.no_grad()
def initialize_tables(collection: EmbeddingCollection, seed: int) -> None:
    """Fill an unsharded collection's tables."""
    for config in collection.embedding_configs():
        weight = collection.embeddings[config.name].weight
        fill_table_shard(weight, seed, config.name, config.num_embeddings)


@torch.no_grad()
def fill_table_shard(shard: Tensor, seed: int, table: str, table_rows: int, first_row: int = 0, first_column: int = 0) -> None:
    """Uniform(-1/sqrt(table_rows), 1/sqrt(table_rows)) for one shard, [rows, columns], of a table, in place."""
    key = name_key(seed, table)
    bound = table_rows**-0.5
    step = max(1, _CHUNK_ELEMENTS // max(shard.shape[1], 1))
    for start in range(0, shard.shape[0], step):
        rows = torch.arange(start, min(start + step, shard.shape[0]), device=shard.device)
        bits = random_bits(row_keys(key, rows + first_row, torch.zeros_like(rows)), shard.shape[1], first_column)
        shard[start : start + len(rows)] = bits.float() * (bound / 2**31)
