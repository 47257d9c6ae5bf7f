"""The loops that `step_overhead.py` compares: the same work by hand, with hpctrain, with others.

Each is a function that gets a `Setup` and yields after each step. What is logged every 10 steps:

- by hand: the mean loss of these steps and of all ranks, the rate and images per second, as a line
  of JSON
- bare: nothing
- hpctrain: the same, and the wait for data
- accelerate, Lightning Fabric, ignite: what is logged by hand
"""

import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

import hpctrain

__all__ = ["ARMS", "BASE", "BATCH", "LOG_EVERY", "Arm", "Setup", "data", "launched", "missing"]

LOG_EVERY = 10
BATCH, FEATURES, WIDTH, CLASSES = 32, 32, 128, 10


def data(samples: int) -> TensorDataset:
    """So many samples, the same in every arm."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, FEATURES, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )


@dataclasses.dataclass
class Setup:
    """What every arm begins with: the same work.

    Attributes:
        session: whose ranks and process group all arms use.
        dataset: to train on.
        folder: for logs.
        steps: that are taken in a row.
    """

    session: hpctrain.Session
    dataset: TensorDataset
    folder: Path
    steps: int

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and its optimizer; the same weights in every arm."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def shared(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as an expert lets the ranks share them, with the settings of hpctrain."""
        if self.backend == "ddp":
            model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        elif self.backend == "horovod":
            import horovod.torch as hvd

            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, optimizer

    def baseline(self) -> DataLoader[Any]:
        """The loader that an expert writes."""
        world = self.session.world
        sampler: Any = RandomSampler(self.dataset)
        if world.world_size > 1:
            sampler = DistributedSampler(self.dataset, world.world_size, world.rank, drop_last=True)
        return DataLoader(self.dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))

    def plain(self) -> DataLoader[Any]:
        """The loader of one process, as others ask for it."""
        return DataLoader(self.dataset, BATCH, shuffle=True, drop_last=True)

    @property
    def backend(self) -> str:
        """How the ranks talk."""
        return self.session.backend.name

    def mean(self, loss: float) -> float:
        """The mean over the ranks, as an expert writes it."""
        world_size = self.session.world.world_size
        if self.backend == "horovod":
            import horovod.torch as hvd

            loss = hvd.allreduce(torch.tensor(loss), name="loss").item()
        elif world_size > 1:
            total = torch.tensor(loss)
            torch.distributed.all_reduce(total)
            loss = total.item() / world_size
        return loss

    @contextmanager
    def log(self, name: str, optimizer: Any) -> Iterator[Callable[[float], None]]:
        """What takes the loss of each step, and writes a line of JSON every 10 of them."""
        world, step, total, since = self.session.world, 0, 0.0, time.perf_counter()

        def add(loss: float) -> None:
            nonlocal step, total, since
            step += 1
            total += loss
            if step % LOG_EVERY == 0:
                now, loss = time.perf_counter(), self.mean(total / LOG_EVERY)
                row = {
                    "step": step,
                    "time": time.time(),
                    "loss": loss,
                    "lr": optimizer.param_groups[0]["lr"],
                    "samples_per_second": LOG_EVERY * BATCH * world.world_size / (now - since),
                }
                total, since = 0.0, now
                if world.rank == 0:
                    log.write(json.dumps(row) + "\n")

        with open(self.folder / f"{name}-{world.rank}.jsonl", "w", buffering=1) as log:
            yield add


def baseline(setup: Setup) -> Iterator[None]:
    """The loop that an expert writes, with the log that an expert has."""
    model, optimizer = setup.shared(*setup.parts())
    with setup.log("by-hand", optimizer) as log:
        for inputs, targets in setup.baseline():
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
            yield


def bare(setup: Setup) -> Iterator[None]:
    """By hand over hpctrain's loader, without a log: only the work that no loop can leave out."""
    model, optimizer = setup.shared(*setup.parts())
    for inputs, targets in setup.session.loader(setup.dataset):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def with_hpctrain(setup: Setup) -> Iterator[None]:
    """The loop of hpctrain's examples, with everything on that is on by default."""
    session = setup.session
    model, _ = session.prepare(*setup.parts())
    loader = session.loader(setup.dataset)
    with session.run() as run:
        for _ in run.epochs():
            for inputs, targets in run.batches(loader):
                with session.autocast():
                    loss = cross_entropy(model(inputs), targets)
                session.step(loss)
                run.log(loss=loss)
                yield


@contextmanager
def launched(session: hpctrain.Session) -> Iterator[None]:
    """The variables by which others learn of the ranks, for as long as they ask.

    The process group is there by then, and they take it as it is.
    """
    world = session.world
    environ = {
        "RANK": str(world.rank), "LOCAL_RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size), "LOCAL_WORLD_SIZE": str(world.world_size),
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ, environ if world.world_size > 1 else {}):
        yield
    torch.set_num_threads(threads)


def with_accelerate(setup: Setup) -> Iterator[None]:
    """The loop of Accelerate's quick tour."""
    from accelerate import Accelerator

    with launched(setup.session):
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(*setup.parts(), setup.plain())
    assert accelerator.num_processes == setup.session.world.world_size
    with setup.log("accelerate", optimizer) as log:
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
            yield


def with_fabric(setup: Setup) -> Iterator[None]:
    """The loop of Fabric's introduction."""
    from lightning_fabric import Fabric

    size = setup.session.world.world_size
    with launched(setup.session):
        fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
        fabric.launch()
        model, optimizer = fabric.setup(*setup.parts())
        loader = fabric.setup_dataloaders(setup.plain())
    assert fabric.world_size == size
    with setup.log("fabric", optimizer) as log:
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
            yield


def with_ignite(setup: Setup) -> Iterator[None]:
    """An ignite Engine around the step by hand, which logs in a handler."""
    from ignite.engine import Engine, Events

    model, optimizer = setup.shared(*setup.parts())

    def step(engine: Engine, batch: Any) -> float:
        inputs, targets = batch
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    engine = Engine(step)
    with setup.log("ignite", optimizer) as log:
        engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: log(engine.state.output)
        )
        # Its loop cannot yield: it takes all steps of a block, then the others cost nothing.
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=setup.steps), engine.interrupt)
        loader = setup.baseline()
        while True:
            engine.run(loader, max_epochs=1)
            for _ in range(setup.steps):
                yield


@dataclasses.dataclass(frozen=True)
class Arm:
    """A loop that takes part.

    Attributes:
        loop: yields after each step.
        has_target: whether the targets are its own.
        package: that it needs, as it is imported; of a peer.
    """

    loop: Callable[[Setup], Iterator[None]]
    has_target: bool = False
    package: str | None = None


BASE = "by hand"
# A new arm is a function that yields after each step, and a line here.
ARMS = {
    BASE: Arm(baseline),
    "bare, no log": Arm(bare),
    "hpctrain": Arm(with_hpctrain, has_target=True),
    "accelerate": Arm(with_accelerate, package="accelerate"),
    "Lightning Fabric": Arm(with_fabric, package="lightning_fabric"),
    "pytorch-ignite": Arm(with_ignite, package="ignite"),
}


def missing(backend: str) -> dict[str, str]:
    """The arms that cannot take part over a backend, each with the reason."""
    reasons = {}
    for name, arm in ARMS.items():
        if arm.package and backend == "horovod":
            reasons[name] = "its loop here is over torch.distributed"
        elif arm.package and importlib.util.find_spec(arm.package) is None:
            reasons[name] = "not installed: pip install 'hpctrain[benchmark]'"
    return reasons
