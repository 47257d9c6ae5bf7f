"""A training and its job, as a project that runs `mypy --strict` writes them."""

import argparse
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import hpctrain

Sample = tuple[Tensor, Tensor]


class Points(Dataset[Sample]):
    """Points of two classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Net(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.layer(inputs))

    def penalty(self) -> Tensor:
        return self.layer.weight.square().sum()


def train(args: argparse.Namespace) -> float:
    """Train, and return the share of right answers."""
    with hpctrain.Session(
        args, backend="auto", run_dir=Path("runs"), ddp={"bucket_mb": 50}, fsdp="hybrid"
    ) as session:
        model = session.prepare(Net())
        optimizer, loader = session.prepare(
            SGD(model.parameters(), lr=0.1), DataLoader(Points(), batch_size=4, shuffle=True)
        )
        assert_type(model, Net)
        assert_type(optimizer, SGD)
        assert_type(loader, DataLoader[Sample])
        found = session.prepare(model, optimizer, loader, split_batches=True)
        assert_type(found, tuple[Net, SGD, DataLoader[Sample]])
        with session.run(state={"schedule": StepLR(optimizer, 2)}) as run:
            for epoch in run.epochs(2):
                for inputs, targets in run.batches(loader):
                    with session.autocast():
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                    session.step(loss + model.penalty())
                    run.log(loss=loss, epoch=assert_type(epoch, int))
            assert_type(run.step, int)
        right = torch.zeros((), dtype=torch.int64)
        scores = session.classification(2)
        for inputs, targets in session.loader(Points(), train=False):
            outputs: Tensor = model(inputs)
            scores.update(outputs, targets)
            right += (outputs.argmax(1) == targets).sum()
            assert_type(session.gather_for_metrics((outputs, 1)), tuple[Tensor, int])
        assert_type(session.sum(right, 64), tuple[float, ...])
        assert_type(session.broadcast_object("name"), str)
        assert_type(session.world, hpctrain.World)
        return session.sum(right) / 64


def lengths(name: str, count: int) -> list[int]:
    """Return a result for each rank."""
    return [len(name)] * count


def start() -> None:
    """Start ranks here, and a job."""
    parser = hpctrain.options(description="points")
    parser.add_argument("--width", type=int, default=4)
    assert_type(hpctrain.detect().world_size, int)
    assert_type(hpctrain.spawn(lengths, 2, ("a", 2)), list[list[int]])
    spec = hpctrain.JobSpec(nodes=2, gpus_per_node=4, time="1h")
    job = hpctrain.submit(lengths, spec, args=("a",), kwargs={"count": 2})
    assert_type(job.run_dir, Path)
    assert_type(hpctrain.jobs.find(job.id), hpctrain.jobs.Job)
    assert_type(job.wait(timeout=10), str)
    try:
        train(parser.parse_args())
    except hpctrain.HpctrainError as error:
        raise SystemExit(assert_type(error.exit_code, int)) from error


def mistakes(session: hpctrain.Session, run: hpctrain.Run) -> None:
    """Make mistakes, each of which mypy has to find: an ignore without an error is one itself."""
    hpctrain.Session(precison="bf16")  # type: ignore[call-arg]
    hpctrain.Session(epochs="two")  # type: ignore[arg-type]
    hpctrain.Session(ddp={"bukcet_mb": 50})  # type: ignore[arg-type]
    session.step(0.5)  # type: ignore[arg-type]
    session.prepare("model")  # type: ignore[call-overload]
    session.prepare(Net()).penalty(1)  # type: ignore[call-arg]
    session.world.rank = 1  # type: ignore[misc]
    run.epochs("two")  # type: ignore[arg-type]
    hpctrain.JobSpec(nodes="two")  # type: ignore[arg-type]
    hpctrain.spawn(lengths, "all")  # type: ignore[arg-type]
    hpctrain.submit(lengths)  # type: ignore[call-arg]
    hpctrain.Trainer  # type: ignore[attr-defined]  # noqa: B018
