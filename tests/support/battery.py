"""A session, a model, data and a loop for tests of every backend."""

import os

import pytest
import ranks
import torch
from torch import nn

import hpctrain
import hpctrain.rundir
from hpctrain.arguments import Batches
from hpctrain.cluster.world import World
from hpctrain.data import Images, TrainingSampler

# The fixture `run` over ddp by default, and over Horovod with --all.
HOROVOD_SLOW = pytest.mark.parametrize(
    "run", ["auto", pytest.param("horovod", marks=pytest.mark.slow)], indirect=True
)


def session(**options):
    """Open a session over the backend of the `run` fixture; outside of it, over the default one.

    Without another interval, it saves at the end of each epoch, whatever a save costs here.
    """
    settings = {"checkpoint_minutes": 1000.0, **options}
    return hpctrain.Session(backend=os.environ.get("TEST_BACKEND", "auto"), **settings)


def small_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)
    )


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 255, (count, 8, 8), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.randint(0, 10, (count,), generator=generator), 127.0, 60.0)


def fit(session, model, loader, after=lambda run: None, taken=lambda run, loss: loss):
    """Train a prepared model to the end of a run, a step and a row for each batch; return the run.

    Args:
        session, model, loader: the session, and the model and loader that it prepared.
        after: called after each batch.
        taken: returns the loss that the step gets.
    """
    with session.run() as run:
        for _ in run.epochs():
            for batch, targets in run.batches(loader):
                with session.autocast():
                    loss = nn.functional.cross_entropy(model(batch), targets)
                session.step(taken(run, loss))
                run.log(loss=loss)
                after(run)
    return run


def train(session, steps, model=None, lr=0.05):
    """Train; return the losses of the first steps, and the model."""
    model = model or small_model()
    model, _optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr, 0.9))
    losses = []
    run = fit(session, model, session.loader(images(240)))
    assert run.step <= steps
    path = run.directory.path
    if session.is_main:
        losses = [row["loss"] for row in hpctrain.rundir.RunDirectory(path).rows()]
    return losses, model


def orders(samples, batch, epochs, seed=0):
    """Return the samples of each step, by epoch, for a loop without a session."""
    world = World(0, 1, 0, 1, 0, 1, ("here",), "none")
    sampler = TrainingSampler(samples, Batches(batch, batch, 1), world, seed)
    found = []
    for epoch in range(epochs):
        sampler.epoch = epoch
        found.append(list(sampler))
    return found


def identity():
    with session(batch_size=2) as opened:
        return opened.world, opened.backend.rank, opened.backend.world_size


def by_world_size(run, sizes, program, folder, monkeypatch):
    """Run a program in worlds of several sizes, each in its own folder; return results by size."""
    found = {}
    for size in sizes:
        (folder / str(size)).mkdir()
        monkeypatch.chdir(folder / str(size))
        found[size] = ranks.values(run(size, program))
    return found
