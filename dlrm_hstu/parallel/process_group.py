"""The process group of a run: torchrun's, or one of a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """rank, world_size: of this process in the run. device: what it computes on."""

    rank: int
    world_size: int
    device: torch.device


def pick_device(name: str) -> torch.device:
    """The device "auto", "cpu" or "cuda" stands for on this rank. Raises ValueError where it does not exist."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("TrainConfig.device='cuda': this machine shows no GPU to torch; use 'cpu' or 'auto'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(device_name: str) -> Iterator[Ranks]:
    """Join the run's process group for the length of the block; torchrun's environment says which, without it this process is alone."""
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(dist.get_world_size()))  # the sharding planner asks for it
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def gather_rows(local: torch.Tensor, world_size: int) -> torch.Tensor:
    """[n, ...] on every rank -> [world_size * n, ...] on every rank, rank-major. All ranks need the same shape."""
    if world_size == 1:
        return local
    gathered = local.new_empty(world_size * local.shape[0], *local.shape[1:])
    dist.all_gather(list(gathered.chunk(world_size)), local.contiguous())
    return gathered
