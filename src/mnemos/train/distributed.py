"""One process, or several under torchrun: rank and device, sharding of the model, sums over processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import ParallelConfig
from .hooks import AnyModel


@dataclass
class World:
    """This process among `size` processes, and its device."""

    rank: int
    size: int
    device: torch.device
    ours: bool = False  # whether we opened the process group and must close it

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The sum of each number over all processes."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._cpu_group())
        return total.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._cpu_group())

    def broadcast(self, value):
        """Broadcast the value of the first process to all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._cpu_group())
        return box[0]

    def _cpu_group(self):
        return None  # the default group carries CPU tensors by gloo, also with nccl

    def close(self) -> None:
        if self.ours and dist.is_initialized():
            dist.destroy_process_group()


def open_device(device: str) -> torch.device:
    """A torch device by name; raises a ValueError if it is not available.

    >>> open_device("cpu")
    device(type='cpu')
    """
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(chosen)
    except RuntimeError:
        raise ValueError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:0") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r} is not available: torch sees no GPU")
    if place.type == "meta":
        raise ValueError("device='meta' holds no numbers; use auto, cpu, cuda or cuda:0")
    try:
        torch.empty(1, device=place)
    except (RuntimeError, NotImplementedError, AssertionError):
        raise ValueError(f"device={device!r} cannot be used on this machine; use auto, cpu, cuda or cuda:0") from None
    return place


def open_world(device: str = "auto") -> World:
    """Join the process group of torchrun, or run as a single process."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    place = open_device(device)
    if place.type == "cuda":
        if place.index is None:
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    ours = False
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
        ours = True
    return World(rank, size, place, ours)


class Spread:
    """A model sharded or replicated over processes. `call` runs forward, `model` holds the parameters.

    shards: the modules that FSDP gathers one at a time, inner ones first.
    """

    def __init__(self, model: AnyModel, world: World, config: ParallelConfig, shards: Iterable[nn.Module]):
        self.model, self.world = model, world
        self.strategy = "none" if world.size == 1 else "fsdp" if config.strategy == "auto" else config.strategy
        self.call: nn.Module = model
        if self.strategy == "ddp":
            devices = [world.device.index] if world.device.type == "cuda" else None
            self.call = nn.parallel.DistributedDataParallel(model, device_ids=devices)
        elif self.strategy in ("fsdp", "hybrid"):
            self._shard(config, shards)

    def _shard(self, config: ParallelConfig, shards: Iterable[nn.Module]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size, kind = self.world.size, self.world.device.type
        if self.strategy == "fsdp":
            mesh = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
        else:
            shard = config.shard or int(os.environ.get("LOCAL_WORLD_SIZE", size))
            if size % shard:
                raise ValueError(f"parallel.shard={shard} must divide the {size} processes")
            mesh = init_device_mesh(kind, (size // shard, shard), mesh_dim_names=("copy", "shard"))
        for module in shards:
            fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def syncing(self, last: bool) -> AbstractContextManager:
        """Context of a backward pass: gradients are exchanged only in the last one of a step."""
        if self.strategy in ("fsdp", "hybrid"):
            self.model.set_requires_gradient_sync(last)  # ty: ignore[not-callable]
        elif isinstance(self.call, nn.parallel.DistributedDataParallel) and not last:
            return self.call.no_sync()
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Reshard all weights: a forward pass without a backward pass leaves some gathered."""
        if self.strategy in ("fsdp", "hybrid"):
            from torch.distributed.fsdp import FSDPModule

            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @property
    def gradient_scale(self) -> float:
        """Factor of the loss: gradients are averaged over processes, but each loss is a part of a sum."""
        return float(self.world.size)


def full(x: Tensor) -> Tensor:
    """The full tensor of a possibly sharded one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # ty: ignore[not-callable]
