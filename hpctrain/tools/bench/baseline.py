"""The baseline: what an expert writes without hpctrain, with direct calls of torch or Horovod.

The calls use the ranks that an open backend of hpctrain has connected.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpctrain.backends.base import Backend
from hpctrain.backends.ddp.ddp_backend import NO_BUFFERS_IN_FORWARD

__all__ = ["direct_sum", "share", "update"]


def direct_sum(backend: Backend) -> Callable[[Tensor], Any]:
    """Return the direct call that sums a tensor over the ranks in place.

    Args:
        backend: open backend for several ranks.
    """
    if backend.name == "horovod":
        hvd = importlib.import_module("horovod.torch")
        return lambda tensor: hvd.allreduce_(tensor, name="baseline", op=hvd.Sum)
    return dist.all_reduce


def share(backend: Backend, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return model and optimizer prepared for training with the other ranks, as hpctrain sets them.

    Args:
        backend: open backend.
        model: model, on its device.
        optimizer: optimizer of the model's parameters.
    """
    if backend.name == "ddp":
        devices = [backend.device] if backend.device.type == "cuda" else None
        model = DistributedDataParallel(
            model, devices, gradient_as_bucket_view=True, **NO_BUFFERS_IN_FORWARD
        )
        return model, optimizer
    if backend.name == "dataparallel":
        return nn.DataParallel(model), optimizer
    if backend.name == "horovod":
        hvd = importlib.import_module("horovod.torch")
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return model, optimizer


def update(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Take the optimizer step after a backward pass.

    Args:
        optimizer: optimizer that `share` returned.
        scaler: scaler of the loss; it may be disabled.
    """
    if scaler.is_enabled() and hasattr(optimizer, "skip_synchronize"):  # of Horovod
        # The scaler has to check averaged gradients.
        optimizer.synchronize()  # type: ignore[attr-defined]
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
