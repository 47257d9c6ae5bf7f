"""The loops that `step_overhead.py` compares: the baseline, hpctrain, and other libraries.

Each loop is an iterator of a `Setup` that yields after each step. Logged every 10 steps:

- baseline: the mean loss of these steps over all ranks, the learning rate and the
  samples per second, as a line of JSON
- baseline, again: the same, to see how far two equal arms differ
- bare: nothing
- hpctrain: the same as the baseline, and the time spent waiting for data
- accelerate, Lightning Fabric, ignite: the same as the baseline
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
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

import hpctrain
from hpctrain.tools.bench.baseline import direct_sum, share

__all__ = ["ARMS", "BASE", "BATCH", "LOG_EVERY", "OURS", "Setup", "data", "launched", "missing"]

LOG_EVERY = 10
BATCH, FEATURES, WIDTH, CLASSES = 32, 32, 128, 10


def data(samples: int) -> TensorDataset:
    """Return this many samples, the same in every arm."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, FEATURES, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )


@dataclasses.dataclass
class Setup:
    """Settings and parts of the work, which are the same for every arm.

    Attributes:
        session: session whose ranks and process group all arms use.
        dataset: data set to train on.
        folder: folder for logs.
        steps: steps per block.
    """

    session: hpctrain.Session
    dataset: TensorDataset
    folder: Path
    steps: int

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a new model and its optimizer, with the same weights in every arm."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def shared(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return new parts for data-parallel training by DDP or Horovod, set as in hpctrain."""
        return share(self.session.backend, *self.parts())

    def baseline(self) -> DataLoader[Any]:
        """Return the loader of the baseline, from torch's own classes."""
        world = self.session.world
        sampler: Any = RandomSampler(self.dataset)
        if world.world_size > 1:
            sampler = DistributedSampler(self.dataset, world.world_size, world.rank, drop_last=True)
        return DataLoader(self.dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))

    def plain(self) -> DataLoader[Any]:
        """Return a loader for one process, which other libraries split over the ranks."""
        return DataLoader(self.dataset, BATCH, shuffle=True, drop_last=True)

    def mean(self, loss: float) -> float:
        """Return the mean over the ranks, by a direct call of torch or Horovod."""
        ranks, total = self.session.world.world_size, torch.tensor(loss)
        if ranks > 1:
            direct_sum(self.session.backend)(total)
        return total.item() / ranks

    @contextmanager
    def log(self, name: str, optimizer: Any) -> Iterator[Callable[[float], None]]:
        """Yield a function that takes each step's loss and logs a line of JSON every 10 steps."""
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


def logged(
    setup: Setup,
    name: str,
    parts: tuple[nn.Module, torch.optim.Optimizer],
    loader: DataLoader[Any],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> Iterator[None]:
    """Run a loop of torch with a log."""
    model, optimizer = parts
    with setup.log(name, optimizer) as log:
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
            yield


def baseline(setup: Setup) -> Iterator[None]:
    """Return the baseline: a loop that uses torch or Horovod directly, with a log."""
    return logged(setup, "manual", setup.shared(), setup.baseline())


def bare(setup: Setup) -> Iterator[None]:
    """Run the baseline's steps over hpctrain's loader, without a log: the least possible work."""
    model, optimizer = setup.shared()
    for inputs, targets in setup.session.loader(setup.dataset):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def with_hpctrain(setup: Setup) -> Iterator[None]:
    """Run the loop of hpctrain's examples, with all features that are on by default."""
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
    """Set the variables from which other libraries read the ranks, within the `with` block.

    The process group exists already, and the libraries use it.
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
    """Return the loop of Accelerate's quick tour."""
    from accelerate import Accelerator

    with launched(setup.session):
        accelerator = Accelerator(cpu=True)
        *parts, loader = accelerator.prepare(*setup.parts(), setup.plain())
    assert accelerator.num_processes == setup.session.world.world_size
    return logged(setup, "accelerate", tuple(parts), loader, accelerator.backward)


def with_fabric(setup: Setup) -> Iterator[None]:
    """Return the loop of Fabric's introduction."""
    from lightning_fabric import Fabric

    size = setup.session.world.world_size
    with launched(setup.session):
        fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
        fabric.launch()
        parts = fabric.setup(*setup.parts())
        loader = fabric.setup_dataloaders(setup.plain())
    assert fabric.world_size == size
    return logged(setup, "fabric", parts, loader, fabric.backward)


def with_ignite(setup: Setup) -> Iterator[None]:
    """Run the baseline's step in an ignite Engine, which logs in a handler."""
    from ignite.engine import Engine, Events

    model, optimizer = setup.shared()

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
        # Its loop cannot yield. It takes all steps of a block at once; the yields cost nothing.
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=setup.steps), engine.interrupt)
        loader = setup.baseline()
        while True:
            engine.run(loader, max_epochs=1)
            for _ in range(setup.steps):
                yield


BASE, OURS = "baseline", "hpctrain"
# To add an arm, write such a function, and add a line here; for a loop of another library, add its
# import name below.
ARMS: dict[str, Callable[[Setup], Iterator[None]]] = {
    BASE: baseline,
    "baseline, again": baseline,
    "bare, no log": bare,
    OURS: with_hpctrain,
    "accelerate": with_accelerate,
    "Lightning Fabric": with_fabric,
    "pytorch-ignite": with_ignite,
}
PEERS = {
    "accelerate": "accelerate",
    "Lightning Fabric": "lightning_fabric",
    "pytorch-ignite": "ignite",
}


def missing(backend: str) -> dict[str, str]:
    """Return the arms that cannot run over a backend, each with the reason."""
    if backend == "horovod":
        return dict.fromkeys(PEERS, "its loop here is over torch.distributed")
    return {
        name: "not installed: pip install 'hpctrain[benchmark]'"
        for name, package in PEERS.items()
        if importlib.util.find_spec(package) is None
    }
