"""The model over the ranks of a run: TorchRec shards the tables, the dense part is replicated."""

import logging
import warnings

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_hstu.config import ModelConfig, OptimizerConfig
from dlrm_hstu.initialize import fill_table_shard
from dlrm_hstu.model import DlrmHSTU

# Once a process, torch warns of a name that TorchRec uses and no user of this trainer can change.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def build_sharded_model(config: ModelConfig, optimizer: OptimizerConfig, *, seed: int, device: torch.device) -> DistributedModelParallel:
    """A DlrmHSTU with its tables sharded over all ranks and updated by row-wise Adagrad inside the backward pass."""
    model = DlrmHSTU(config, seed=seed, device=device, table_device="meta")
    tables = model.embeddings.collection
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": optimizer.sparse_lr, "eps": optimizer.sparse_epsilon})
    with _quiet_torchrec():
        # A static graph hangs its first all-reduce on tensors it finds in the output; it looks into no dataclass and would skip it.
        replicate = DefaultDataParallelWrapper(static_graph=False)
        sharded = DistributedModelParallel(model, device=device, init_data_parallel=False, data_parallel_wrapper=replicate)
        if dist.get_world_size() > 1:
            sharded.init_data_parallel()
    _fill_tables(sharded, config, seed)
    return sharded


def _fill_tables(sharded: DistributedModelParallel, config: ModelConfig, seed: int) -> None:
    """Overwrite TorchRec's draw, which depends on the plan, with ours, which does not."""
    collection = unwrap(sharded).embeddings.collection
    for name, weight in collection.state_dict().items():
        table = name.removeprefix("embeddings.").removesuffix(".weight")
        for shard in weight.local_shards():
            row, column = shard.metadata.shard_offsets
            fill_table_shard(shard.tensor, seed, table, config.table_rows[table], row, column)


def unwrap(sharded: DistributedModelParallel) -> DlrmHSTU:
    """The DlrmHSTU inside its wrappers."""
    module = sharded.module
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module


class _quiet_torchrec(warnings.catch_warnings):
    """Hold back the planner's advice on hardware descriptions, which a user of this trainer cannot act on."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
        self._level = logging.getLogger("torchrec").level
        logging.getLogger("torchrec").setLevel(logging.ERROR)

    def __exit__(self, *details):
        logging.getLogger("torchrec").setLevel(self._level)
        super().__exit__(*details)
