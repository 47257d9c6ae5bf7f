"""Context of a training on one rank: what its parts share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from hpctrain.arguments import Batches, Options, plan_batches
from hpctrain.backends.base import Backend
from hpctrain.backends.meta_models import Unfilled
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.world import World
from hpctrain.data import TrainingSampler
from hpctrain.data.feed import Placement
from hpctrain.data.own_loaders import batch_size
from hpctrain.data.shared import share
from hpctrain.data.shared_order import Shared, Sharing
from hpctrain.precision import Precision
from hpctrain.process.events import Events
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Roster
from hpctrain.training.preemption import Preemption

__all__ = ["Context", "parameters_of"]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(slots=True, eq=False)
class Context:
    """What session, run, checkpoints and monitor of one rank share.

    The first part is fixed when the ranks are connected; the second part changes as the script
    prepares objects and trains.

    Attributes:
        options: options of the session.
        own_options: options that the script added to the common ones, by name.
        allocation: job of the scheduler, or None.
        preemption: stop requests that this rank has received.
        exit_status_file: path of the exit status file; None except at rank 0.
        world: rank, world size and hosts of this process; no field is None.
        roster: list of all ranks, with their hosts and settings.
        batches: global batch size, micro-batch size and accumulation.
        device: device used by this rank.
        precision: number format of weights, activations and gradients.
        backend: backend for the communication between ranks.
        opened: times in Unix seconds: when the rendezvous began, and when all were connected.
        workers: number of loader processes of this rank.
        placement: device, data type and memory layout of batches.

        events: calls from lower layers to the session and the run.
        models, optimizers: prepared models and optimizers, in the order of preparation.
        unfilled: values that prepared models on the meta device still need.
        resumed: whether the run has the weights of its checkpoint, and has trained no step since.
        samplers: samplers of the loaders of training sets.
        datasets: data sets of the loaders, in the order in which the loaders were created.
        adopted: whether the batch size is that of a prepared loader.
        stream: loader of the script that the run is in, whose state is in the checkpoint.
        frozen: digests of the frozen parameters as the run opened; None if checkpoints have them.
        rates_loaded: optimizers that have had no scheduler in this start, only in the checkpoint.
    """

    options: Options
    own_options: Mapping[str, Any]
    allocation: Allocation | None
    preemption: Preemption
    exit_status_file: str | None
    world: World
    roster: Roster
    batches: Batches
    device: torch.device
    precision: Precision
    backend: Backend
    opened: tuple[float, float]
    workers: int
    placement: Placement

    events: Events = field(default_factory=Events)
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    unfilled: list[Unfilled] = field(default_factory=list)
    resumed: bool = False
    samplers: list[TrainingSampler] = field(default_factory=list)
    datasets: list[Dataset[Any]] = field(default_factory=list)
    adopted: bool = False
    stream: Shared | None = None
    frozen: list[dict[str, int]] | None = None
    rates_loaded: Sequence[Optimizer] = ()

    def share(self, loader: Any, split: bool = False) -> Shared:
        """Return a loader of the script as the ranks share it; see `data.share`."""
        options, world = self.options, self.world
        sharing = Sharing(
            world.rank,
            world.world_size,
            self.batches.accumulate,
            options.seed,
            options.same_data,
            self.placement,
            self.events,
            self.backend.all_gather_text,
        )
        return share(loader, sharing, split)

    def adopt(self, shared: Shared) -> None:
        """Take the batch size of a prepared loader, unless an option or a loader has set it."""
        options, source = self.options, shared.source
        given = options.batch_size or options.global_batch or self.adopted or self.samplers
        if isinstance(source, DataLoader):
            size = batch_size(source, shared.parts)
            if size is not None and not given:
                self.adopted = True
                options = replace(options, batch_size=size)
                self.batches = plan_batches(options, self.world.world_size)
                logger.info("the batch size is that of the DataLoader: %s", self.batches)
