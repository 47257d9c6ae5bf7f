"""Training run: run directory, position in the loop, metrics and checkpoints."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from hpctrain.cluster import env_vars
from hpctrain.errors import CheckpointError, ReplacedError, UsageError, exit_codes
from hpctrain.monitoring.watchdog import Watchdog
from hpctrain.process import random_states, seeds
from hpctrain.process.logging import logger
from hpctrain.process.phases import (
    AFTER_LOADING,
    AGREEING,
    COMPUTING,
    IDLE,
    LOADING,
    SAVING,
    UPDATING,
    WAITING,
)
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.effective_time import Recorder
from hpctrain.training import epoch_batches, schedulers
from hpctrain.training.agreement import Agreement
from hpctrain.training.checkpoint_manager import CheckpointManager
from hpctrain.training.consensus import meet
from hpctrain.training.context import Context
from hpctrain.training.frozen_weights import digests
from hpctrain.training.gradient_guard import watch_clipping
from hpctrain.training.journal import RunJournal, code_of
from hpctrain.training.metrics import Metrics
from hpctrain.training.monitor import Monitor
from hpctrain.training.preemption import Stopped
from hpctrain.training.replica_check import ReplicaCheck
from hpctrain.training.restoring import Restored, restore, restore_from
from hpctrain.training.resume_source import Source
from hpctrain.training.state import Position, refuse_stateless
from hpctrain.training.step import Step

__all__ = ["Run"]

T = TypeVar("T")


class Run:
    """A training run: context manager around the loop, made by `session.run()`.

    It resumes from the newest checkpoint of its directory if `--resume` is given, and by default
    with `--elastic` or in a requeued job. After a stop request it takes a checkpoint and raises
    `preemption.Stopped`, a `SystemExit`, at the same step on all ranks.

    Attributes:
        directory: run directory, the same on all ranks.
        epoch: index of the current epoch, from 0.
        finished: whether the run was finished before this start. Then models and optimizers have
            the state of its end, `epochs`, `batches`, `log` and `save` do nothing, and the script
            goes on behind the loop.
    """

    directory: RunDirectory
    # Made as the run opens, in this order; an error may come between them.
    _journal: RunJournal
    _watchdog: Watchdog
    _monitor: Monitor
    _metrics: Metrics
    _replicas: ReplicaCheck
    _checkpoints: CheckpointManager
    _agreement: Agreement

    def __init__(
        self, context: Context, step: Step, state: dict[str, Any], name: str | None
    ) -> None:
        refuse_stateless(state)
        self._context, self._step = context, step
        self._state = dict(state)
        self._left: dict[str, Any] = {}  # saved states of objects that do not exist yet
        self._name, script = name, Path(sys.argv[0]).stem
        self._script = _UNNAMED.get(script, script)
        self.epoch = 0
        self.finished = False
        self._epoch_step = 0  # steps done in this epoch
        self._batches = 0  # micro-batches done in this epoch
        self._own: dict[str, Any] = {}  # saved states of this rank, until they are used
        self._epochs: int | None = None
        limit = context.options.max_steps
        self._most_steps = sys.maxsize if limit is None else limit
        # Values that were logged before the first pass of the batch, whose count is not known yet.
        self._early: list[Mapping[str, Any]] = []
        self._save_due = False  # whether the script has asked for a checkpoint
        self._in_epoch = False  # whether the script is in the body of an epoch
        self._compared = False  # whether the ranks have compared their data sets
        self._compares = _FIRST_STEPS  # steps left in which the ranks compare their weights
        self._begun = False  # whether the loop has requested the batches of this epoch
        self._knows_schedulers = False  # whether the first step has found all schedulers
        self._paused = time.monotonic()  # end of the last batches
        self._undo = ExitStack()  # restores what a run changes in its process
        self._recorder: Recorder | None = None
        self._events = context.events

    @property
    def step(self) -> int:
        """Number of optimizer steps done, current as `session.step` or `optimizer.step` returns."""
        return self._step.number

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _open(self) -> None:
        context = self._context
        self._step.begin_run()
        meet(context.backend, "session.run()")
        self._journal = journal = RunJournal(context, self._name, self._script)
        self.directory = journal.directory
        if journal.finished:
            self._open_finished()
            return
        context.preemption.begin(self.directory)
        self._watchdog = Watchdog(
            context.world,
            context.options.timeout,
            env_vars.number(os.environ, env_vars.LEAST_TIMEOUT),
            self.directory,
            journal.key,
            context.exit_status_file,
            self._events.heartbeat,
            context.backend.dump_to(self.directory.logs),
        )
        self._seconds = self._events.heartbeat.seconds
        self._monitor = monitor = Monitor(context, self.directory, self._name or self._script)
        self._find_schedulers()
        resumed = restore(context, self.directory, self._state)
        if resumed is None and (source := Source.of_options(context, self.directory)) is not None:
            resumed = restore_from(context, source, self._state)
        elif context.options.resume_from is not None:
            logger.info(
                "%s has a checkpoint: the run continues there, not at --resume-from",
                self.directory.path,
            )
        for unfilled in context.unfilled:
            unfilled.refuse()
        context.frozen = None if context.options.checkpoint_frozen else digests(context)
        position, on_disk = (resumed.position, resumed.on_disk) if resumed else (None, None)
        if resumed is not None:
            self._go_on(resumed)
        elif context.options.resume or self.directory.lines(self.directory.starts):
            logger.info(
                "there is no checkpoint in %s: the run starts at step 0", self.directory.path
            )
        self._events.row = monitor.row
        self._metrics = journal.begin(self.step, position.rows if position else 0)
        self._replicas = ReplicaCheck(context, self._seconds, self.step, resumed is not None)
        self._recorder = journal.recorder
        self._checkpoints = CheckpointManager(
            context, self._replicas, self._state, journal, on_disk
        )
        self._metrics.load_state_dict(self._own.pop("log", None) or {})
        self._agreement = agreement = Agreement(
            context, self._metrics, self._replicas, self._checkpoints, monitor.timings
        )
        logger.info("run directory %s", self.directory.path)
        agreement.now("the beginning of the run", self.step, self.epoch)
        # A state of another run is first saved in this one, after its next step.
        if agreement.stop is not None and on_disk == position:
            context.preemption.obeyed(self.directory)
            raise Stopped(f"{agreement.stop}, before the first step", os.environ)
        monitor.begin(self.step)
        self._events.heartbeat.step = self.step
        self._events.evaluated = monitor.evaluated
        self._step.in_run = True
        watch_clipping(self._step.before_clipping, self._undo)

    def _open_finished(self) -> None:
        """Load the state at the end of a finished run, for what the script does behind its loop."""
        self.finished = True
        restored = restore(self._context, self.directory, self._state)
        if restored is not None:
            self._step.number, self.epoch = restored.position.step, restored.position.epoch
            self._own = restored.own
            self._put_back_random()
        logger.info(
            "%s is finished at step %d, so its loop is left out; a larger --epochs or --max-steps "
            "goes on with it, and --run-dir DIR begins another",
            self.directory.path,
            self.step,
        )

    def _find_schedulers(self) -> None:
        """Add the prepared schedulers to the checkpoints, and count the calls of all schedulers.

        Also restore schedulers that the script prepared after the run was opened.
        """
        for thing in self._state.values():
            if isinstance(thing, LRScheduler):
                schedulers.prepare_scheduler(thing, self._step)
        found = schedulers.named(
            self._step.schedulers, self._context.optimizers, self._state.values()
        )
        for name, scheduler in found.items():
            self._state[name] = scheduler
            if name in self._left:
                scheduler.load_state_dict(self._left.pop(name))
                schedulers.put_back_rates(scheduler)

    def _go_on(self, resumed: Restored) -> None:
        """Continue from a restored position."""
        position, self._left = resumed.position, resumed.left
        self._step.number, self.epoch = position.step, position.epoch
        self._epoch_step = position.epoch_step
        self._batches = position.batches(self._context.batches.accumulate)
        self._step.before = resumed.later
        self._own = resumed.own
        if self.step > self._most_steps:
            max_steps, step = self._most_steps, self.step
            raise UsageError(
                "HT614.max-steps-passed", max_steps=max_steps, step=step, twice_as_many=2 * step
            )
        logger.info("resumed at step %d, in epoch %d", self.step, self.epoch + 1)

    def epochs(self, default: int | None = None) -> Iterator[int]:
        """Iterate over the remaining epochs, with a checkpoint at the end of the last one.

        With `--checkpoint-every`, `--checkpoint-minutes` or `--keep-best`, each epoch ends with a
        checkpoint. Without them, the time that a checkpoint takes decides where the next one is.

        Args:
            default: number of epochs if neither `--epochs` nor `--max-steps` is given.

        Raises:
            UsageError: no option or argument limits the training, or `--max-steps` is the only
                limit and an epoch has no batch.
            Stopped: the run received a stop request.
        """
        if self.finished:
            return
        options = self._context.options
        self._epochs = options.epochs or (None if options.max_steps else default)
        if self._epochs is None and options.max_steps is None:
            raise UsageError("HT614.no-end")
        if not self._batches:
            self._put_back_random()
        last = sys.maxsize if self._epochs is None else self._epochs
        while self.epoch < last and self.step < self._most_steps:
            before, batches = self.step, self._batches
            self._begun = self._step.cut_short = False
            self._in_epoch = True
            try:
                yield self.epoch
            finally:
                self._in_epoch = False
            self._settle()
            if self.step == before and self._epochs is None and not self._batches:
                raise UsageError("HT614.empty-epoch", epoch=self.epoch + 1, options=options)
            seen = self._batches - batches
            if not self._epoch_step and seen and self._context.optimizers:
                raise UsageError("HT605.no-optimizer-step", seen=seen, epoch=self.epoch + 1)
            self._drop_rest()
            if not self._step.cut_short:
                self.epoch += 1
                self._epoch_step = self._batches = 0
            pause = time.monotonic() - self._paused
            self._agreement.longest_pause = max(self._agreement.longest_pause or 0.0, pause)
            self._end_epoch(last=self.epoch >= last or self.step >= self._most_steps)
            self._stop_here()

    def _end_epoch(self, last: bool) -> None:
        """Save at the end of an epoch, if a checkpoint is due or the loop ends there."""
        if not (last or self._checkpoints.at_epochs or self._save_due):
            self._events.heartbeat.enter(WAITING)
            due = self._agreement.now("the end of an epoch", self.step, self.epoch)
            self._events.heartbeat.enter(IDLE)
            if not due:
                return
        self._save()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over the remaining micro-batches of this epoch, up to `--max-steps`.

        Args:
            loader: loader of `session.loader()`, or any other iterable of batches, which are split
                over the ranks and moved to the device. A DataLoader over a data set with indices
                is split by the order of its sampler, and a run that resumes inside an epoch skips
                in this order. Another iterable that splits itself is left alone; of one that is
                the same on all ranks, each rank takes its part. Its `state_dict()` is saved, if it
                has one; without it, a resumed run fetches the earlier batches and drops them.

        Raises:
            UsageError: second call in this epoch, or another rank has different data.
            Stopped: the run received a stop request.
        """
        if self.finished:
            return
        self._settle()
        if self._begun:
            raise UsageError("HT605.batches-twice", epoch=self.epoch + 1)
        self._begun = True
        context, step = self._context, self._step
        options, world = context.options, context.world
        if not self._compared:
            self._compared = True
            self._look_around()
        number = seeds.derive("epoch", options.seed, self.epoch, world.rank)
        random_states.seed(number, context.device, options.seed_everything)
        state = self._own.pop("stream", None)
        iterator, length = epoch_batches.begin(
            loader, context, step, self.epoch, self._batches, state, self._monitor.see_samples
        )
        self._put_back_random()
        self._monitor.begin_batches(self.step, self.epoch, self._epoch_step, self._epochs, length)
        deterministic = options.deterministic
        limit = self._most_steps
        phase = self._events.heartbeat.enter
        try:
            while step.number < limit:
                phase(LOADING)
                batch: Any = next(iterator, _END)
                if batch is _END:
                    break
                phase(COMPUTING)
                if deterministic:
                    micro_batch = step.bodies * world.world_size + world.rank
                    number = seeds.derive("step", options.seed, step.number, micro_batch)
                    random_states.seed(number, context.device, options.seed_everything)
                step.begin_body()
                try:
                    yield batch
                finally:
                    step.in_body = False
                self._settle(in_loop=True)
            else:
                step.cut_short = next(iterator, _END) is not _END
            self._save_before_evaluation()
        finally:
            phase(IDLE)
            self._paused = time.monotonic()
            self._monitor.end_batches(self.step)

    def steps(self, number: int) -> Iterator[int]:
        """Iterate over the remaining steps of a loop that draws its batches itself.

        The steps are one epoch, with a checkpoint at its end. With accumulation, the body runs once
        for each micro-batch.

        Args:
            number: number of steps; `--max-steps` overrides it.

        Yields:
            Number of steps done.

        Raises:
            Stopped: the run received a stop request.
        """
        context = self._context
        steps = range((context.options.max_steps or number) * context.batches.accumulate)
        for _ in self.epochs(1):
            for _ in self.batches(steps):
                yield self.step

    def _look_around(self) -> None:
        """Check what the script has created, before the first batches of a start.

        Raises:
            UsageError: another rank has different data.
        """
        context = self._context
        context.resumed = False
        self._find_schedulers()
        for name in self._left:
            logger.warning("the checkpoint has a %s, and this script has not", name)
        if context.backend.name == "horovod" and "torchmetrics" in sys.modules:
            logger.warning(
                "torchmetrics knows torch.distributed alone: over Horovod each rank computes from "
                "its own samples; session.sum(), or --backend ddp"
            )
        meet(context.backend, "the first call of run.batches()", self._events)
        epoch_batches.refuse_other_data(context)

    def _settle(self, in_loop: bool = False) -> None:
        """Count the last micro-batch of the loop, and complete the step that it has ended.

        A loop that is left by a break never requests the next batch; then the next call of this run
        counts. (The end of the generator is not the right place: it also ends after an error.)

        Args:
            in_loop: whether the loop has requested the next batch. If not, a checkpoint or a stop
                waits for the end of the epoch: a resumed run would train what the break left out.
        """
        if not self._step.pending:
            return
        self._batches += 1
        while self._early:
            self._add(self._early.pop(0))
        if not self._step.end_body():
            return
        context, step = self._context, self._step.number
        self._epoch_step += 1
        if not self._knows_schedulers:
            self._knows_schedulers = True
            own = [one for one in context.optimizers if one not in context.rates_loaded]
            schedulers.refuse_unknown(own, [*self._step.schedulers, *self._state.values()])
        self._monitor.step(step)
        self._metrics.end_step(step, self.epoch)
        if step % context.options.log_every == 0:
            self._end_row()
        overdue = False
        if self._agreement.due(step >= self._replicas.forced):
            self._events.heartbeat.enter(AGREEING)
            overdue = self._agreement.step(step, self.epoch)
            if self._recorder is not None:
                self._recorder.step(step, *self._monitor.ahead(step))
        if self._compares:
            self._events.heartbeat.enter(UPDATING)  # here the ranks wait for each other
            if self._compares == _FIRST_STEPS and self._recorder is not None:
                self._recorder.trained(sum(AFTER_LOADING(self._seconds)))
            self._compares -= 1
            self._replicas.compare(step)
        self._save_due |= overdue or self._checkpoints.due(step)
        if in_loop and self._save_due:
            self._save()
        if in_loop and self._agreement.stop is not None:
            self._stop_here()

    def _save_before_evaluation(self) -> None:
        """Save behind the last batch of an epoch, if what follows may outlast a stop request.

        A run that resumes there repeats the evaluation, not the epoch.
        """
        new = self._position() != self._checkpoints.saved
        if self._agreement.long_pauses and new and self._in_epoch and not self._step.micro_batch:
            self._save()

    def _drop_rest(self) -> None:
        """Drop micro-batches that complete no step: a checkpoint cannot hold their gradients."""
        dropped = self._step.drop()
        if dropped:
            logger.warning(
                "%d micro-batches of an incomplete step are left out, as epoch %d or its loop "
                "ended there",
                dropped,
                self.epoch + 1,
            )

    def _stop_here(self) -> None:
        """Save and leave the run if the consensus is to stop."""
        agreement = self._agreement
        if agreement.stop is None:
            return
        reason, where = agreement.stop, "from here"
        if self._position() != self._checkpoints.saved:
            self._save()
        self._events.heartbeat.enter(SAVING)
        self._monitor.timings.finish(self.step, self.epoch)
        try:
            self._checkpoints.finish()
        except ReplacedError:
            raise
        except CheckpointError as error:
            # Still stop: a later start repeats some steps, but a failure would end the training.
            self._checkpoints.lost()
            saved = self._checkpoints.saved
            where = f"from step {saved.step if saved else 0}"
            reason = f"{reason}; {error.found}"
        self._context.preemption.obeyed(self.directory)
        by = f"{agreement.stop}{agreement.asking}"
        logger.info("stopped by %s at step %d; --resume goes on %s", by, self.step, where)
        raise Stopped(f"{reason}, after step {self.step}", os.environ)

    def log(self, **values: Any) -> None:
        """Log numbers under names.

        Inside `batches`, values belong to the step of the batch. Values that are logged in every
        step make one row each `--log-every` steps: the mean over these steps, their micro-batches
        and all ranks. Values that are logged in some steps only, such as an evaluation every 100
        steps, make a separate row with the number of that step: the mean over the ranks. Tensors
        stay on their device until they are needed. Outside `batches`, the values make a separate
        row and have to be the same on all ranks, like the totals of an evaluation.

        Args:
            values: numbers, or tensors of one element; the same names on all ranks.

        Raises:
            UsageError: a value is neither.
        """
        if self.finished:
            return
        if not self._step.in_body:
            self._settle()
            self._metrics.write(self.step, self.epoch, values)
        elif self._step.passed:
            self._add(values)
        else:
            self._early.append(self._metrics.numbers(values))

    def _add(self, values: Mapping[str, Any]) -> None:
        """Add values of a micro-batch, weighted by its samples or by the tokens of its losses."""
        step, count = self._step, self._step.tokens.count
        self._metrics.add(values, step.weight if count is None else count, count is not None)

    def save(self) -> None:
        """Take a checkpoint of everything that determines the next step; called by all ranks.

        In the body of `batches`, it is taken as the step of this body ends; in the body of
        `epochs`, as this body ends. So the lines behind this call, such as `scheduler.step()`, do
        not run twice after a resume. Rank 0 writes it while training continues. If the write fails,
        rank 0 logs the error, and the earlier checkpoints are kept.

        Raises:
            NonFiniteError: the weights are no longer finite; the earlier checkpoints are kept.
            ReplicaError: the ranks do not have the same weights any more; the same.
        """
        if self.finished:
            return
        saved = self._checkpoints.saved
        if self._step.in_body:
            # Between two micro-batches of the next step there may be nothing new.
            self._save_due |= self._step.done or saved is None or saved.step != self.step
        elif self._in_epoch:
            self._save_due = True
        else:
            self._settle()  # for a loop that was left by a break
            self._drop_rest()
            self._save()

    def _save(self) -> None:
        """Save the state; called by all ranks."""
        self._events.heartbeat.enter(WAITING)
        self._agreement.now("a checkpoint", self.step, self.epoch)
        self._events.heartbeat.enter(SAVING)
        metrics, log = self._metrics.at(self.step), self._metrics.state_dict()
        self._checkpoints.save(self._position(), metrics, log)
        self._save_due = False
        if self._recorder is not None:
            self._recorder.saved(self.step)
        self._events.heartbeat.enter(IDLE)

    def _position(self) -> Position:
        skipped = self._batches - self._epoch_step * self._context.batches.accumulate
        return Position(self.step, self.epoch, self._epoch_step, self._metrics.rows, skipped)

    def _put_back_random(self) -> None:
        """Restore the random state of this rank from the checkpoint."""
        random = self._own.pop("random", None)
        if random is not None:
            random_states.put_back(random, self._context.device)

    def _end_row(self) -> None:
        context, tail = self._context, self._monitor.lap(self.step)
        if context.optimizers:
            groups = context.optimizers[0].param_groups
            tail = {"lr": max(float(group["lr"]) for group in groups), **tail}
        numbers = context.precision.numbers()
        if self._step.norm is not None:
            numbers = {"grad_norm": self._step.norm, **numbers}
        self._metrics.end_row(numbers, tail)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if code_of(error) == exit_codes.DONE and not self.finished:
                # The script may have caught the exception that ends it, by `except BaseException`.
                self._stop_here()
                self._finish()
        except BaseException as late:
            self._close(late)
            raise
        self._close(error)

    def _finish(self) -> None:
        """End the training: save the last step, and write all rows of metrics."""
        self._settle()
        self._drop_rest()
        saved = self._checkpoints.saved
        if saved is None or self.step != saved.step or self._save_due:
            self._save()  # the loop was left by a break
        self._metrics.end_row()
        self._events.heartbeat.enter(WAITING)
        self._agreement.now("the end of the run", self.step, self.epoch)
        self._events.heartbeat.enter(SAVING)
        self._monitor.timings.finish(self.step, self.epoch)
        self._checkpoints.finish()

    def _close(self, error: BaseException | None) -> None:
        """Release everything; writes that are under way are completed.

        Each part is closed even if the one before fails. The summary is written and the directory
        unlocked before this rank waits for a tracker, so a signal can end that wait.
        """
        date, opened = time.time(), vars(self)
        self._context.resumed = self._step.in_run = False
        self._events.close_run()
        with ExitStack() as turns:  # runs in reverse order
            turns.callback(self._undo.close)
            if "_journal" in opened:
                turns.callback(self._journal.drop_logs)
            if "_monitor" in opened:
                turns.callback(self._monitor.close_trackers, code_of(error))
            turns.callback(self._context.preemption.end)
            if "_journal" in opened:
                turns.callback(self._journal.close, error, date, self._facts)
            if "_monitor" in opened:
                turns.callback(self._monitor.close, self.step)
            if "_watchdog" in opened:
                turns.callback(self._watchdog.close)
            if "_checkpoints" in opened:
                turns.callback(self._checkpoints.close)

    def _facts(self) -> dict[str, Any]:
        """Return the position and the speed of the run, for summary.json."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            **self._monitor.facts(),
        }


# Names of runs without a script file: in an interpreter, with -c, from a pipe, in a notebook.
_UNNAMED = {"": "run", "-c": "run", "-": "run", "ipykernel_launcher": "notebook"}

# A mistake in the loop shows in the first steps; later, ranks wait for this only to save.
_FIRST_STEPS = 2

_END = object()
