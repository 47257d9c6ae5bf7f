"""A run: its directory, its position in the loop, its metrics and checkpoints."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from hpctrain import checkpoint, identity, rundir, seeds, speech
from hpctrain.allocation import Allocation
from hpctrain.arguments import Batches, Options
from hpctrain.backends.base import Backend
from hpctrain.data import Loader, TrainingSampler
from hpctrain.data.loader import move
from hpctrain.errors import CheckpointError, HpctrainError, UsageError, repeated
from hpctrain.metrics import Metrics, table
from hpctrain.precision import Precision
from hpctrain.rundir import RunDirectory
from hpctrain.speech import logger
from hpctrain.tee import Tee
from hpctrain.world import World

__all__ = ["Run"]


class Parts(Protocol):
    """What a run needs of its session."""

    world: World
    allocation: Allocation | None
    device: torch.device
    backend: Backend
    precision: Precision
    options: Options
    batches: Batches

    @property
    def models(self) -> Sequence[nn.Module]: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...


class Run:
    """What `session.run()` gives: a context manager that resumes by itself when told to.

    Attributes:
        directory: of the run, the same on all ranks.
        step: optimizer steps done.
        epoch: the epoch under way, from 0.
    """

    directory: RunDirectory

    def __init__(self, session: Parts, state: dict[str, Any], name: str | None) -> None:
        self._session = session
        self._state = state
        self._name = name or Path(sys.argv[0]).stem or "run"
        self.step = 0
        self._saved = 0  # the step of the newest checkpoint
        self.epoch = 0
        self._epoch_step = 0  # steps of this epoch that are done
        self._epochs: int | None = None
        self._index = 0  # micro-batches of the step under way that are done
        self._in_hand = False  # whether a micro-batch was handed out and not yet counted
        self._lap, self._lap_step = 0.0, 0  # when and where the last row of metrics was
        self._begun = False  # whether the batches of this epoch were asked for
        self._cut_short = False  # whether --max-steps ended the epoch under way
        self._due = False  # whether the step under way ends in a row of metrics
        self._in_step = False
        self._seconds = 0.0
        self._trained = 0
        self._log: logging.Handler | None = None
        self._tee: Tee | None = None

    def __enter__(self) -> Self:
        session = self._session
        env = os.environ
        self.directory, finished = self._agree(env)
        self._keep_log()
        try:
            rows = self._resume() if not finished else 0
        except HpctrainError:
            self._drop_log()
            raise
        if finished:
            logger.info("%s is finished; --run DIR begins another", self.directory.path)
            self._drop_log()
            raise SystemExit(rundir.DONE)
        self._metrics = Metrics(
            session.backend,
            self.directory,
            rows,
            session.batches.accumulate * session.world.world_size,
        )
        if session.world.rank == 0:
            identity.note_start(self.directory, session.options, session.world, session.allocation)
            self.directory.summary.unlink(missing_ok=True)
        logger.info("run directory %s", self.directory.path)
        return self

    def _keep_log(self) -> None:
        path = self.directory.log(self._session.world.rank)
        self._log = speech.keep(path)
        self._tee = Tee(path) if self._session.backend.prints else None

    def _drop_log(self) -> None:
        if self._tee is not None:
            self._tee.close()
        if self._log is not None:
            speech.drop(self._log)
        self._tee = self._log = None

    def _agree(self, env: Any) -> tuple[RunDirectory, bool]:
        """Rank 0's choice of a directory, or its error, on all ranks."""
        session = self._session
        answer: tuple[str, Any, Any] = ("", None, None)
        mistake: HpctrainError | None = None
        if session.world.rank == 0:
            try:
                directory, finished = identity.claim(
                    self._name,
                    session.models,
                    session.options,
                    session.world,
                    session.allocation,
                    env,
                )
                answer = ("ok", str(directory.path.absolute()), finished)
            except HpctrainError as error:
                mistake = error
                answer = ("error", [error.found, error.expected, error.fix], error.exit_code)
        kind, what, more = session.backend.share(answer)
        if mistake is not None:
            raise mistake
        if kind == "error":
            found, expected, fix = what
            raise repeated(found, expected, fix, more)
        return RunDirectory(what), more

    def epochs(self, default: int | None = None) -> Iterator[int]:
        """The epochs that are left, each with a checkpoint at its end.

        Args:
            default: how many there are when neither `--epochs` nor `--max-steps` was given.

        Raises:
            UsageError: nothing says how long to train.
        """
        options = self._session.options
        self._epochs = options.epochs or (None if options.max_steps else default)
        if self._epochs is None and options.max_steps is None:
            raise UsageError(
                "nothing says how long to train", "an end", "--epochs N or --max-steps N"
            )
        while (self._epochs is None or self.epoch < self._epochs) and not self._enough():
            before, self._cut_short, self._begun = self.step, False, False
            yield self.epoch
            self._settle()
            if self.step == before and self._epochs is None and not self._epoch_step:
                raise UsageError(
                    f"epoch {self.epoch} had no step, so --max-steps {options.max_steps} is "
                    "never reached",
                    "run.batches(loader) over a loader with samples",
                )
            if not self._cut_short:
                self.epoch += 1
                self._epoch_step = 0
            self.save()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches that are left of this epoch, up to `--max-steps`.

        Args:
            loader: of `session.loader()`; or any iterable of batches, which are moved to the
                device. The latter cannot skip, so a run that resumes inside of an epoch fetches
                what it has seen once more and drops it.

        Raises:
            UsageError: it is the second time in this epoch.
        """
        self._settle()
        if self._begun:
            raise UsageError(
                f"run.batches() for the second time in epoch {self.epoch}",
                "once in each epoch, as the position in the epoch is that of one loader",
                "for epoch in run.epochs(): for batch in run.batches(loader): …",
            )
        self._begun = True
        session = self._session
        options, world = session.options, session.world
        torch.manual_seed(seeds.derive("epoch", options.seed, self.epoch, world.rank))
        iterator = self._iterate(loader)
        self._lap = started = time.perf_counter()
        first = self._lap_step = self.step
        deterministic, every = options.deterministic, options.log_every
        limit = sys.maxsize if options.max_steps is None else options.max_steps
        try:
            while self.step < limit:
                batch = next(iterator, _END)
                if batch is _END:
                    return
                if self._index == 0:
                    self._due = (self.step + 1) % every == 0
                if deterministic:
                    micro_batch = self._index * world.world_size + world.rank
                    torch.manual_seed(seeds.derive("step", options.seed, self.step, micro_batch))
                self._in_step = True
                try:
                    yield batch
                finally:
                    self._in_step = False
                    self._in_hand = True
                self._settle()
            self._cut_short = next(iterator, _END) is not _END
        finally:
            self._seconds += time.perf_counter() - started
            self._trained += (self.step - first) * session.batches.global_batch

    def _settle(self) -> None:
        """Count the micro-batch that was handed out last, and with the last of a step the step.

        A loop that is left by a break never asks for the next batch: then the next call of this
        run does it. (Closing a generator is no place for it: that also happens after an error.)
        """
        if not self._in_hand:
            return
        self._in_hand = False
        session = self._session
        self._index += 1
        if self._index < session.batches.accumulate:
            return
        self._index = 0
        self.step += 1
        self._epoch_step += 1
        if self._due:
            now = time.perf_counter()
            samples = (self.step - self._lap_step) * session.batches.global_batch
            self._end_row(samples / (now - self._lap))
            self._lap, self._lap_step = now, self.step
        else:
            self._metrics.poll()
        every = session.options.checkpoint_every
        if every and self.step % every == 0:
            self.save()

    def log(self, **values: Any) -> None:
        """Note numbers under names.

        Inside of `batches` they belong to the step under way: every `--log-every` steps they are
        averaged over all its micro-batches and ranks, and tensors stay on their device until they
        are needed. Outside they are a row of their own and have to be the same on all ranks, as
        an evaluation's totals are.

        Args:
            values: numbers, or tensors of one element; the same names on all ranks.
        """
        if not self._in_step:
            self._settle()
            self._metrics.write(self._head(), values)
        elif self._due:
            self._metrics.add(values)

    def save(self) -> None:
        """Commit a checkpoint of all that makes the next step; called by all ranks.

        Raises:
            UsageError: a step is under way, so weights and position would not belong together.
            CheckpointError: it could not be written.
        """
        if self._in_step:
            raise UsageError(
                "run.save() inside of run.batches(), where a step is under way",
                "a place between two steps",
                "--checkpoint-every STEPS, or save after the loop over the batches",
            )
        session = self._session
        self._metrics.flush()
        self._saved = self.step
        if session.world.rank != 0:
            return
        state = {
            "model": [model.state_dict() for model in session.models],
            "optimizer": [optimizer.state_dict() for optimizer in session.optimizers],
            "precision": session.precision.state_dict(),
            "state": {name: thing.state_dict() for name, thing in self._state.items()},
            "position": {
                "step": self.step,
                "epoch": self.epoch,
                "epoch_step": self._epoch_step,
                "rows": self._metrics.rows,
                "global_batch": session.batches.global_batch,
                "world_size": session.world.world_size,
            },
        }
        facts = {"time": time.time(), "world": asdict(session.world)}
        checkpoint.save(self.directory, self.step, state, facts)

    def _resume(self) -> int:
        """Load the newest checkpoint where there is one; the rows of metrics to keep."""
        loaded = self._load()
        if loaded is None:
            return 0
        _, state = loaded
        session, position = self._session, state["position"]
        if position["global_batch"] != session.batches.global_batch:
            raise UsageError(
                f"the run in {self.directory.path} has a global batch of "
                f"{position['global_batch']}, this start one of {session.batches.global_batch}",
                "the same global batch, so that its samples go on where they stopped",
                f"--global-batch {position['global_batch']}",
            )
        before, now = position["world_size"], session.world.world_size
        if before != now and not session.options.elastic:
            raise UsageError(
                f"the run in {self.directory.path} has {before} ranks, this start {now}",
                "as many ranks again, so that its sums have the same order",
                f"{before} ranks; or --elastic, to go on with {now}",
            )
        groups: tuple[tuple[str, Sequence[Any]], ...] = (
            ("model", session.models),
            ("optimizer", session.optimizers),
        )
        for part, things in groups:
            if len(state[part]) != len(things):
                raise UsageError(
                    f"the checkpoint has {len(state[part])} {part}s, the script prepared "
                    f"{len(things)}",
                    "the same script",
                    "--run DIR for another directory",
                )
            for thing, thing_state in zip(things, state[part], strict=True):
                thing.load_state_dict(thing_state)
        session.precision.load_state_dict(state["precision"])
        for name, thing in self._state.items():
            if name in state["state"]:
                thing.load_state_dict(state["state"][name])
            else:
                logger.warning("the checkpoint has no %s; it starts anew", name)
        self.step, self.epoch = position["step"], position["epoch"]
        self._epoch_step = position["epoch_step"]
        self._saved = self.step
        logger.info("resumed at step %d, epoch %d", self.step, self.epoch)
        return int(position["rows"])

    def _load(self) -> tuple[int, dict[str, Any]] | None:
        """The newest checkpoint, the same on all ranks.

        Raises:
            CheckpointError: it cannot be read, or ranks find another than rank 0.
        """
        session = self._session
        loaded, mistake = None, None
        try:
            loaded = checkpoint.load_newest(self.directory)
        except CheckpointError as error:
            mistake = error
        here = -1 if loaded is None else loaded[0]
        first = session.backend.share(here)
        unlike = torch.tensor(int(mistake is not None or here != first), device=session.device)
        ranks = int(session.backend.sum(unlike).item())
        if mistake is not None:
            raise mistake
        if ranks:
            raise CheckpointError(
                f"{ranks} of {session.world.world_size} ranks do not find in "
                f"{self.directory.path} the checkpoint that rank 0 finds"
                + (f" (step {first})" if first >= 0 else " (none)"),
                "a run directory on a file system that all hosts share",
                "--run DIR",
            )
        return loaded

    def _enough(self) -> bool:
        limit = self._session.options.max_steps
        return limit is not None and self.step >= limit

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches of this epoch from the position on."""
        if isinstance(loader, Loader) and isinstance(loader.sampler, TrainingSampler):
            loader.sampler.epoch = self.epoch
            loader.sampler.first_step = self._epoch_step
            return iter(loader)
        session = self._session
        iterator = (move(b, session.device, session.precision.dtype) for b in loader)
        seen = self._epoch_step * session.batches.accumulate
        if seen:
            logger.warning("this loader cannot skip: %d batches are fetched and dropped", seen)
            for _ in range(seen):
                next(iterator, None)
        return iterator

    def _end_row(self, speed: float) -> None:
        optimizers = self._session.optimizers
        tail = {"samples_per_second": speed}
        if optimizers:
            tail = {"lr": float(optimizers[0].param_groups[0]["lr"]), **tail}
        self._metrics.end_step(self._head(), tail)

    def _head(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        code = rundir.DONE if well else rundir.FAILED
        if well:
            self._settle()
            if self.step != self._saved:
                self.save()  # the loop was left by a break
            self._metrics.flush()
        self._metrics.close()
        if self._session.world.rank == 0:
            self._summarise(code)
        self._drop_log()

    def _summarise(self, code: int) -> None:
        """Write summary.json, and say in a few lines how it went."""
        session = self._session
        speed = self._trained / self._seconds if self._seconds else 0.0
        summary = {
            "status": rundir.STATUS[code],
            "step": self.step,
            "epoch": self.epoch,
            "metrics": self._metrics.last,
            "seconds": self._seconds,
            "samples_per_second": speed,
            "world_size": session.world.world_size,
            "backend": session.backend.name,
            "precision": session.options.precision,
        }
        rundir.replace(self.directory.summary, json.dumps(summary, indent=1) + "\n")
        if code == rundir.DONE:
            sys.stdout.write(table(summary, session.backend.transport, self.directory.path))
            sys.stdout.flush()


_END = object()
