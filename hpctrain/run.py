"""A run: its directory, its position in the loop, its metrics and checkpoints."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from hpctrain import checkpoint, identity, optim, preparation, rundir, seeds, speech
from hpctrain.data import Loader, TrainingSampler
from hpctrain.errors import HpctrainError, NonFiniteError, UsageError, repeated
from hpctrain.metrics import Metrics, table
from hpctrain.rundir import RunDirectory
from hpctrain.speech import logger
from hpctrain.state import Parts, Position, gather, refuse_nonfinite, restore
from hpctrain.tee import Tee

__all__ = ["Run"]


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
        self._schedule: optim.Schedule | None = None
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
            position = restore(session, self.directory, self._state) if not finished else None
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
            self._go_on(position),
            session.batches.accumulate,
            lambda: session.precision.nonfinite.streak >= session.options.max_nonfinite,
        )
        if session.world.rank == 0:
            identity.note_start(self.directory, session.options, session.world, session.allocation)
            self.directory.summary.unlink(missing_ok=True)
        logger.info("run directory %s", self.directory.path)
        return self

    def _go_on(self, position: Position | None) -> int:
        """Take up a position; the rows of metrics to keep."""
        if position is None:
            return 0
        self.step, self.epoch = position.step, position.epoch
        self._epoch_step = position.epoch_step
        self._saved = self.step
        logger.info("resumed at step %d, epoch %d", self.step, self.epoch)
        return position.rows

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
        self._plan(loader)
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
                    if self._schedule is not None:
                        optim.apply(session.optimizers, self._schedule.factor(self.step))
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
            self._metrics.add(values, self._session.weight)

    def save(self) -> None:
        """Commit a checkpoint of all that makes the next step; called by all ranks.

        Raises:
            UsageError: a step is under way, so weights and position would not belong together.
            CheckpointError: it could not be written.
            NonFiniteError: the weights are not finite any more; the checkpoints before are kept.
        """
        if self._in_step:
            raise UsageError(
                "run.save() inside of run.batches(), where a step is under way",
                "a place between two steps",
                "--checkpoint-every STEPS, or save after the loop over the batches",
            )
        self._settle()  # a loop that was left by a break
        session = self._session
        self._metrics.flush()
        with nullcontext() if session.ema is None else session.ema.original():
            self._commit()

    def _commit(self) -> None:
        session = self._session
        refuse_nonfinite(session, self.step)
        self._refuse_streak()
        self._saved = self.step
        if session.world.rank != 0:
            return
        position = Position(self.step, self.epoch, self._epoch_step, self._metrics.rows)
        state = gather(session, self._state, position)
        facts = {"time": time.time(), "world": asdict(session.world)}
        checkpoint.save(self.directory, self.step, state, facts)

    def _enough(self) -> bool:
        limit = self._session.options.max_steps
        return limit is not None and self.step >= limit

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches of this epoch from the position on."""
        session = self._session
        for sampler in session.samplers:  # also of those that the script has wrapped
            sampler.epoch, sampler.first_step = self.epoch, 0
        if isinstance(loader, Loader) and isinstance(loader.sampler, TrainingSampler):
            loader.sampler.first_step = self._epoch_step
            return iter(loader)
        iterator = map(session.placement, loader)
        seen = self._epoch_step * session.batches.accumulate
        if seen:
            logger.warning("this loader cannot skip: %d batches are fetched and dropped", seen)
            for _ in range(seen):
                next(iterator, None)
        return iterator

    def _plan(self, loader: Iterable[Any]) -> None:
        """The course of the learning rate, once the length of an epoch is known."""
        session = self._session
        sampler = loader.sampler if isinstance(loader, Loader) else None
        length: int | None = None
        if isinstance(sampler, TrainingSampler):
            length = sampler.steps
        elif isinstance(loader, Sized):
            length = len(loader) // session.batches.accumulate
        schedule = preparation.plan_schedule(session.options, length, self._epochs)
        if schedule is None or schedule == self._schedule:
            return
        if any(map(optim.scheduled, session.optimizers)):
            raise UsageError(
                "a scheduler of the script's own, and --lr-schedule or --lr-warmup-epochs",
                "one course of the learning rate",
                "leave the options out, or remove the scheduler from the script",
            )
        self._schedule = schedule
        logger.info("learning rate: %s", schedule.describe())

    def _end_row(self, speed: float) -> None:
        session = self._session
        tail = {"samples_per_second": speed}
        if session.optimizers:
            tail = {"lr": float(session.optimizers[0].param_groups[0]["lr"]), **tail}
        self._metrics.end_step(self._head(), session.precision.numbers(), tail)
        self._refuse_streak()

    def _refuse_streak(self) -> None:
        """End a run that goes nowhere, on all ranks at the same step."""
        session, ranks = self._session, self._metrics.given_up
        if ranks:
            error = NonFiniteError(
                f"{session.options.max_nonfinite} steps in a row overflowed or had no finite loss, "
                f"on {ranks:.0f} of {session.world.world_size} ranks, before step {self.step}",
                f"fewer in a row (--max-nonfinite {session.options.max_nonfinite})",
                f"--resume goes on from step {self._saved}; a lower --lr, --lr-warmup-epochs, "
                "--clip-norm or --precision bf16 or fp32 may mend it",
            )
            error.told_by_rank_0 = session.world.rank > 0
            raise error

    def _head(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        code = rundir.FAILED
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self._settle()
                if self.step != self._saved:
                    self.save()  # the loop was left by a break
                self._metrics.flush()
                code = rundir.DONE
        finally:
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
            "precision": session.precision.name,
            "learning_rate": self._schedule.describe() if self._schedule else "constant",
        }
        rundir.replace(self.directory.summary, json.dumps(summary, indent=1) + "\n")
        if code == rundir.DONE:
            sys.stdout.write(table(summary, session.backend.transport, self.directory.path))
            sys.stdout.flush()


_END = object()
