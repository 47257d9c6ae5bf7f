"""Benchmark of a training step: hpctrain's loop and a baseline, on the same data and ranks."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from hpctrain.backends.base import Work
from hpctrain.backends.baseline import Baseline
from hpctrain.errors import UsageError
from hpctrain.tools.bench import models
from hpctrain.tools.bench.measure import compare, describe, spell, table
from hpctrain.tools.bench.turns import Times, calls_for, in_turns, slowest, timed
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["evaluate", "measure", "show"]

BASELINE, OURS, ALONE = "baseline", "hpctrain", "baseline, no communication"
_BLOCK_SECONDS, _MOST_STEPS = 0.25, 100
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Loop(Protocol):
    def step(self) -> None:
        """Run one step; the device may still be busy afterwards."""

    def read(self) -> None:
        """Read the loss, as a log does from time to time."""


class _HandWrittenLoop:
    """Baseline: the loop that an expert writes without hpctrain.

    Args:
        session: open session, only for its device, precision, layout and compile option.
        make: function that creates the model.
        batch: images and targets on the device.
        baseline: calls that share the model among the ranks.
    """

    def __init__(
        self,
        session: Session,
        make: Callable[[], nn.Module],
        batch: tuple[Tensor, Tensor],
        baseline: Baseline,
    ) -> None:
        device, precision = session.device, session.precision.name
        layout = torch.channels_last if session.placement.channels_last else torch.preserve_format
        model = make().to(device, memory_format=layout)  # type: ignore[call-overload]
        if session.options.compile:
            model.compile()
        self._batch, self._baseline = batch, baseline
        self._model, self._optimizer = baseline.share(model, _optimizer(model))
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self._device, self._half = device, _AUTOCAST.get(precision)

    def step(self) -> None:
        """Run forward, backward and update."""
        images, targets = self._batch
        with self._autocast():
            loss = cross_entropy(self._model(images), targets)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._baseline.step(self._optimizer, self._scaler)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._loss = loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        return (
            nullcontext() if self._half is None else torch.autocast(self._device.type, self._half)
        )

    def read(self) -> None:
        """Read the loss of this rank."""
        self._loss.item()


class _Ours:
    """Loop with hpctrain, as in the examples.

    Args:
        session: open session.
        make: function that creates the model.
        batch: images and targets on the device.
    """

    def __init__(
        self, session: Session, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]
    ) -> None:
        model = make()
        self._session, self._batch = session, batch
        self._model, _ = session.prepare(model, _optimizer(model))
        self._sum: Work | None = None

    def step(self) -> None:
        """Run forward and `session.step`."""
        images, targets = self._batch
        with self._session.autocast():
            loss = cross_entropy(self._model(images), targets)
        self._session.step(loss)
        self._loss = loss.detach()

    def read(self) -> None:
        """Read the loss of all ranks, one call late to avoid a wait, as a row of metrics does."""
        if self._sum is not None:
            self._sum.values()
        self._sum = self._session.backend.sum_async([self._loss])


def _optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


class _Arm:
    """Blocks of steps of a loop, and the GPU memory that this loop uses.

    Args:
        session: open session.
        make: function that creates the loop.
        steps: number of steps in a block; None for as many as take a quarter of a second.
    """

    def __init__(self, session: Session, make: Callable[[], _Loop], steps: int | None) -> None:
        self._device = session.device
        before = self._allocated()
        self._loop = make()
        default = calls_for(session, self._loop.step, _BLOCK_SECONDS, _MOST_STEPS)
        self.steps = steps or default
        self._loop.read()
        self._own = self._allocated() - before
        self.peak = 0

    def block(self) -> float:
        """Run a block that ends with a read of the loss, and return the seconds of a step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        others = self._allocated() - self._own
        seconds = timed(self._device, self._run) / self.steps
        if self._device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device) - others)
        return seconds

    def _run(self) -> None:
        for _ in range(self.steps):
            self._loop.step()
        self._loop.read()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def measure(session: Session, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure step time, throughput and memory; all ranks must call this together.

    Args:
        session: open session.
        arguments: arguments `model` and `seconds`.

    Raises:
        UsageError: the model is not available, or does not fit in memory.
    """
    name = on_rank_zero(session.backend, lambda: models.choose(arguments.model, session.device))
    try:
        times, peaks = _measure(session, name, arguments.seconds)
    except torch.OutOfMemoryError as error:
        size = session.batches.batch_size
        raise UsageError(
            "HT907",
            f"no room for a step of {name} with {size} samples: {str(error).splitlines()[0]}",
            "a step that fits the memory of the device",
            f"--batch-size {max(size // 2, 1)}",
        ) from None
    ranks = session.backend.gather_object((times, peaks))
    if not session.is_main:
        return {}
    size, precision = session.batches.batch_size, session.precision.name
    return {
        "model": name,
        "batch_size": size,
        "precision": precision,
        "compile": session.options.compile,
        "channels_last": session.placement.channels_last,
        **evaluate(slowest([own[0] for own in ranks]), [own[1] for own in ranks], size),
    }


def _measure(session: Session, name: str, seconds: float) -> tuple[Times, dict[str, int]]:
    """Return the seconds of a step and the peak memory of each arm on this rank."""
    make, batch = models.maker(name), models.batch_of(name, session)
    baseline = session.backend.baseline()
    loops: dict[str, Callable[[], _Loop]] = {
        BASELINE: lambda: _HandWrittenLoop(session, make, batch, baseline),
        OURS: lambda: _Ours(session, make, batch),
    }
    if session.world.world_size > 1:
        loops[ALONE] = lambda: _HandWrittenLoop(session, make, batch, Baseline())
    arms: dict[str, _Arm] = {}
    for arm_name, loop in loops.items():
        arms[arm_name] = _Arm(session, loop, arms[BASELINE].steps if arms else None)
    times = in_turns(session, {name: arm.block for name, arm in arms.items()}, seconds)
    return times, {name: arm.peak for name, arm in arms.items()}


def evaluate(
    times: Mapping[str, list[float]], peaks: Sequence[Mapping[str, int]], samples: int
) -> dict[str, Any]:
    """Summarise the results of the arms.

    Args:
        times: seconds of a step at the slowest rank for each arm, one value per round.
        peaks: for each rank, the peak bytes on the device of each arm; 0 where unknown.
        samples: number of samples of a rank in a step.
    """
    arms: dict[str, dict[str, Any]] = compare(times, BASELINE, "ms", 1e3)
    for name, arm in arms.items():
        arm["images_per_second"] = samples * len(peaks) / arm["ms"]["median"] * 1e3
        arm["images_per_second_of_a_rank"] = arm["images_per_second"] / len(peaks)
        arm["peak_memory"] = max(peak[name] for peak in peaks) or None
    found: dict[str, Any] = {"arms": arms, "scaling": None}
    if ALONE in times:
        scaling = compare({OURS: times[ALONE], BASELINE: times[OURS]}, BASELINE, "ms")
        found["scaling"] = scaling[OURS]["ratio"]
    return found


def show(found: dict[str, Any]) -> str:
    """Format the results as a table with a row for each loop."""
    head = ["loop", "ms per step", "ratio", "images/s", "of a rank"]
    on_gpu = found["arms"][OURS]["peak_memory"] is not None
    rows = [head + ["peak memory"] * on_gpu]
    for name, arm in found["arms"].items():
        rows.append(
            [
                name,
                describe(arm["ms"], ".2f"),
                describe(arm["ratio"], ".3f") if name != BASELINE else "",
                f"{arm['images_per_second']:,.0f}",
                f"{arm['images_per_second_of_a_rank']:,.0f}",
                *([spell(arm["peak_memory"])] if on_gpu else []),
            ]
        )
    options = ", ".join(name for name in ("compile", "channels_last") if found[name])
    lines = [
        f"{found['model']}, {found['batch_size']} samples of a rank, {found['precision']}"
        + (f", {options}" if options else ""),
        "",
        table(rows),
        "",
        "Medians over rounds at the slowest rank, with 95 % intervals; ratios round by round.",
    ]
    if found["scaling"]:
        lines.append(
            "Scaling: without communication, a step takes "
            f"{describe(found['scaling'], '.3f')} of hpctrain's time."
        )
    return "\n".join(lines)
