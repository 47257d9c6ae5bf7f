"""Benchmark of a training step: hpctrain's loop and a baseline, on the same data and ranks."""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from hpctrain.backends.base import Work
from hpctrain.cluster.texts import first_line
from hpctrain.errors import UsageError
from hpctrain.tools.bench import baseline, models
from hpctrain.tools.bench.measure import Results, compare, describe
from hpctrain.tools.bench.turns import Times, calls_for, in_turns, slowest, timed
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["HALF", "Batches", "Step", "by_hand", "measure", "with_session"]

# Type of the baseline's autocast in each precision that has one. O2 has no loop in plain torch.
HALF = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "O1": torch.float16,
    "O2": torch.float16,
}
Batches = Iterator[tuple[Tensor, Tensor]]
# Runs one step and returns its loss; the device may still be busy.
Step = Callable[[], Tensor]

BASELINE, OURS, ALONE = "baseline", "hpctrain", "baseline, no communication"
_BLOCK_SECONDS, _MOST_STEPS = 0.25, 100


def by_hand(
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    half: torch.dtype | None,
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    clip: float | None = None,
) -> Step:
    """Return the baseline: a step of the loop that an expert writes without hpctrain.

    Args:
        device: device that the model is on.
        model: model; for several ranks as `baseline.share` returned it, and so the optimizer.
        optimizer: optimizer of the model's parameters.
        batches: images and targets on the device, without end.
        half: type of autocast; None for none.
        criterion: function that returns the loss.
        clip: largest norm of the gradients; None for any.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)

    def step() -> Tensor:
        images, targets = next(batches)
        with nullcontext() if half is None else torch.autocast(device.type, half):
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        baseline.update(optimizer, scaler)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_session(
    session: Session,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Step:
    """Return a step of hpctrain's loop, as in the examples.

    Args:
        session: open session.
        model: model, not yet prepared.
        optimizer: optimizer of the model's parameters.
        batches: images and targets on the device, without end.
        criterion: function that returns the loss.
    """
    model, optimizer = session.prepare(model, optimizer)

    def step() -> Tensor:
        images, targets = next(batches)
        with session.autocast():
            loss = criterion(model(images), targets)
        session.step(loss, optimizer)
        return loss.detach()

    return step


def _optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


class _Arm:
    """A loop that runs in blocks of equally many steps; each block ends with a read of the loss.

    Args:
        session: open session.
        make: function that returns the step, and a function that reads its loss, as a log does.
        steps: number of steps in a block; None for as many as take a quarter of a second.
    """

    def __init__(
        self,
        session: Session,
        make: Callable[[], tuple[Step, Callable[[Tensor], Any]]],
        steps: int | None,
    ) -> None:
        self._device = session.device
        before = self._allocated()
        self._step, self._read = make()
        default = calls_for(session, self._step, _BLOCK_SECONDS, _MOST_STEPS)
        self.steps = steps or default
        self._read(self._step())
        self._own = self._allocated() - before
        self.peak = 0

    def block(self) -> float:
        """Run a block, and return the seconds of a step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        others = self._allocated() - self._own
        seconds = timed(self._device, self._run) / self.steps
        if self._device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device) - others)
        return seconds

    def _run(self) -> None:
        for _ in range(self.steps):
            loss = self._step()
        self._read(loss)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def measure(session: Session, arguments: argparse.Namespace) -> Results:
    """Measure step time, throughput and memory; all ranks must call this together.

    Args:
        session: open session.
        arguments: arguments `model` and `seconds`.

    Raises:
        UsageError: the model is not available, or does not fit in memory.
    """
    choice = arguments.model
    model = on_rank_zero(session.backend, lambda: models.choose(choice, session.device))
    size, precision = session.batches.batch_size, session.precision.name
    try:
        own = _measure(session, model, arguments.seconds)
    except torch.OutOfMemoryError as error:
        text, smaller = first_line(error), max(size // 2, 1)
        raise UsageError(
            "HT907.out-of-memory", model=model, size=size, error=text, smaller=smaller
        ) from None
    ranks = session.backend.gather_object(own)
    if not session.is_main:
        return {}
    options = {
        "compile": session.options.compile,
        "channels_last": session.placement.channels_last,
    }
    words = [f"{size} samples of a rank", precision, *(name for name in options if options[name])]
    return {
        "title": f"{model}, {', '.join(words)}",
        "model": model,
        "batch_size": size,
        "precision": precision,
        **options,
        **evaluate(slowest([times for times, _ in ranks]), [peaks for _, peaks in ranks], size),
    }


def _measure(session: Session, name: str, seconds: float) -> tuple[Times, dict[str, int]]:
    """Return the seconds of a step and the peak memory of each arm on this rank."""
    make, batch = models.maker(name), models.batch_of(name, session)
    layout = torch.channels_last if session.placement.channels_last else torch.preserve_format

    def plain(shared: bool) -> tuple[Step, Callable[[Tensor], Any]]:
        model = make().to(session.device, memory_format=layout)  # type: ignore[call-overload]
        if session.options.compile:
            model.compile()
        optimizer = _optimizer(model)
        if shared:
            model, optimizer = baseline.share(session.backend, model, optimizer)
        half, batches = HALF.get(session.precision.name), itertools.repeat(batch)
        return by_hand(session.device, model, optimizer, batches, half), Tensor.item

    def ours() -> tuple[Step, Callable[[Tensor], Any]]:
        model, sums = make(), list[Work]()

        def read(loss: Tensor) -> None:
            """Read the loss of all ranks, one call late to avoid a wait, as a row does."""
            if sums:
                sums.pop().values()
            sums.append(session.backend.sum_async([loss]))

        return with_session(session, model, _optimizer(model), itertools.repeat(batch)), read

    first = _Arm(session, lambda: plain(shared=True), None)
    arms = {BASELINE: first, OURS: _Arm(session, ours, first.steps)}
    if session.world.world_size > 1:
        arms[ALONE] = _Arm(session, lambda: plain(shared=False), first.steps)
    times = in_turns(session, {name: arm.block for name, arm in arms.items()}, seconds)
    return times, {name: arm.peak for name, arm in arms.items()}


def evaluate(times: Times, peaks: Sequence[Mapping[str, int]], samples: int) -> Results:
    """Summarise the results of the arms.

    Args:
        times: seconds of a step at the slowest rank for each arm, one value per round.
        peaks: for each rank, the peak bytes on the device of each arm; 0 where unknown.
        samples: number of samples of a rank in a step.
    """
    series = {name: {"ms": [1e3 * one for one in own]} for name, own in times.items()}
    results = compare(series, BASELINE)
    for name, arm in results.items():
        arm["images_per_s_of_a_rank"] = samples / arm["ms"]["median"] * 1e3
        arm["images_per_s"] = arm["images_per_s_of_a_rank"] * len(peaks)
        if peak := max(own[name] for own in peaks):
            arm["peak_memory"] = peak
    if ALONE not in series:
        return {"results": results}
    share = compare({ALONE: series[ALONE], OURS: series[OURS]}, OURS)[ALONE]["ratio"]
    note = "Scaling: without communication, a step takes {} of hpctrain's time."
    return {"results": results, "scaling": share, "notes": note.format(describe(share, ".3f"))}
