"""A run: its directory, its position in the loop, its metrics and checkpoints."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpctrain import data, optim, rundir
from hpctrain.errors import CheckpointError, ReplacedError, UsageError
from hpctrain.monitoring.watchdog import (
    AGREEING,
    COMPUTING,
    IDLE,
    LOADING,
    SAVING,
    UPDATING,
    WAITING,
    Watchdog,
)
from hpctrain.process import random_states, seeds
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training import identity, prepare
from hpctrain.training.checkpoint_manager import CheckpointManager
from hpctrain.training.consensus import Consensus, meet, on_rank_zero
from hpctrain.training.gradient_guard import watch_clipping
from hpctrain.training.journal import RunJournal, code_of
from hpctrain.training.metrics import Metrics
from hpctrain.training.monitor import Monitor
from hpctrain.training.preemption import REASONS, Stopped
from hpctrain.training.replica_check import refuse_unlike_weights
from hpctrain.training.state import (
    LaterGroups,
    Parts,
    Position,
    Restored,
    refuse_stateless,
    refuse_streak,
    restore,
)

__all__ = ["Run"]


class Run:
    """What `session.run()` gives: a context manager that resumes by itself when told to.

    It leaves by `preemption.Stopped`, an exit, when somebody asks it to stop: after a checkpoint,
    at the same step on all ranks.

    Attributes:
        directory: of the run, the same on all ranks.
        step: optimizer steps done; right as soon as `session.step` or `optimizer.step` returns.
        epoch: the epoch under way, from 0.
    """

    directory: RunDirectory

    def __init__(self, session: Parts, state: dict[str, Any], name: str | None) -> None:
        refuse_stateless(state)
        self._session = session
        self._state = dict(state)
        self._later: list[LaterGroups] = []
        self._left: dict[str, Any] = {}  # states that a checkpoint has, of what is not there yet
        self._name = name or _UNNAMED.get(Path(sys.argv[0]).stem) or Path(sys.argv[0]).stem
        self.step = 0
        self.epoch = 0
        self._epoch_step = 0  # steps of this epoch that are done
        self._batches = 0  # micro-batches of this epoch that are done
        self._random: dict[str, Any] | None = None  # of the checkpoint, until training goes on
        self._epochs: int | None = None
        self._schedule: optim.Schedule | None = None
        self._index = 0  # micro-batches since the last step
        self._in_hand = False  # whether a micro-batch was handed out and not yet counted
        self._stepped = False  # whether it has ended a step
        self._compared = False  # whether the ranks' data sets were
        self._compares = _FIRST_STEPS  # steps after which the ranks compare their weights
        self._looked = False  # whether the first batches of a loader of the script's own were
        self._begun = False  # whether the batches of this epoch were asked for
        self._cut_short = False  # whether --max-steps ended the epoch under way
        self._in_body = False  # whether the loop over the batches is at one of them
        self._stop: str | None = None  # why all ranks stop, once they have agreed
        self._paused, self._pause = time.monotonic(), 0.0  # the longest time between two epochs
        self._undo = ExitStack()  # what a run changes in its process, and puts back
        self._journal: RunJournal | None = None
        self._checkpoints: CheckpointManager | None = None
        self._watchdog: Watchdog | None = None
        self._monitor: Monitor | None = None
        self._heartbeat: Callable[[int], None] = ignore  # shows that this rank lives

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _open(self) -> None:
        session = self._session
        self._journal = journal = RunJournal(session, self._name)
        self.directory = journal.directory
        if journal.finished:
            logger.info(
                "%s is finished, so this start ends here, before what the script does next; a "
                "larger --epochs or --max-steps goes on with it, and --run DIR begins another",
                self.directory.path,
            )
            raise SystemExit(rundir.DONE)
        session.preemption.begin(self.directory, self._save_margin)
        self._watchdog = watchdog = Watchdog(
            session.world,
            session.options.timeout,
            self.directory,
            journal.key,
            session.verdict,
        )
        self._monitor = monitor = Monitor(session, self.directory, self._name, watchdog.seconds)
        self._find_schedulers()
        resumed = restore(session, self.directory, self._state)
        position = resumed.position if resumed else None
        if resumed is not None:
            self._go_on(resumed)
        journal.begin(self.step, position.rows if position else 0, monitor.row)
        facts = identity.facts(self.directory, session.world)
        self._checkpoints = CheckpointManager(
            session, self._state, self.directory, journal.lock, facts, position
        )
        if resumed is not None and resumed.log is not None:
            self._metrics.load_state_dict(resumed.log)
        self._consensus = Consensus(session.backend, self._say, self._doing)
        logger.info("run directory %s", self.directory.path)
        self._hear(self._consensus.now("the beginning of the run"))
        if self._stop is not None:
            session.preemption.obeyed(self.directory)
            raise Stopped(f"{self._stop}, before the first step", os.environ)
        monitor.begin(self.step)
        watchdog.step = self.step
        self._heartbeat = session.heartbeat = monitor.beside(watchdog.heartbeat)
        session.loop = self
        watch_clipping(lambda: self._in_body and self._stepped, self._undo)

    def _find_schedulers(self) -> None:
        """Let schedulers of the prepared optimizers go into the checkpoints.

        One that was made after the run was opened has not been restored yet.
        """
        kept = list(self._state.values())
        for name, scheduler in optim.attached(self._session.optimizers, but=kept).items():
            self._state[name] = scheduler
            if name in self._left:
                scheduler.load_state_dict(self._left.pop(name))
                optim.put_back_rates(scheduler)

    def _go_on(self, resumed: Restored) -> None:
        """Take up a position."""
        position, self._left = resumed.position, resumed.left
        self.step, self.epoch = position.step, position.epoch
        self._epoch_step = position.epoch_step
        self._batches = position.batches(self._session.batches.accumulate)
        self._later = resumed.later
        self._random = resumed.random
        limit = self._session.options.max_steps
        if limit is not None and self.step > limit:
            raise UsageError(
                f"--max-steps {limit}, and the run is at step {self.step} already",
                f"an end at step {self.step} or later",
                f"--max-steps {2 * self.step}, or leave it out",
            )
        logger.info("resumed at step %d, in epoch %d", self.step, self.epoch + 1)

    def epochs(self, default: int | None = None) -> Iterator[int]:
        """The epochs that are left, each with a checkpoint at its end.

        Args:
            default: how many there are when neither `--epochs` nor `--max-steps` was given.

        Raises:
            UsageError: nothing says how long to train.
            Stopped: the run was asked to stop.
        """
        options = self._session.options
        self._epochs = options.epochs or (None if options.max_steps else default)
        if self._epochs is None and options.max_steps is None:
            raise UsageError(
                "nothing says how long to train", "an end", "--epochs N or --max-steps N"
            )
        if not self._batches:
            self._put_back_random()
        while (self._epochs is None or self.epoch < self._epochs) and not self._enough():
            before, self._cut_short, self._begun = self.step, False, False
            yield self.epoch
            self._settle()
            if self.step == before and self._epochs is None and not self._batches:
                raise UsageError(
                    f"epoch {self.epoch} had no batch, so --max-steps {options.max_steps} is "
                    "never reached",
                    "run.batches(loader) over a loader with samples",
                )
            if not self._cut_short:
                self.epoch += 1
                self._epoch_step = self._batches = 0
            self._pause = max(self._pause, time.monotonic() - self._paused)
            self.save()
            self._stop_here()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches that are left of this epoch, up to `--max-steps`.

        Args:
            loader: of `session.loader()`; or any iterable of batches, which are moved to the
                device. The latter cannot skip, so a run that resumes inside of an epoch fetches
                what it has seen once more and drops it.

        Raises:
            UsageError: it is the second time in this epoch, or another rank has other data.
            Stopped: the run was asked to stop.
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
        if not self._compared:
            self._compared = True
            self._look_around()
        number = seeds.derive("epoch", options.seed, self.epoch, world.rank)
        random_states.seed(number, session.device, options.seed_everything)
        iterator, length = self._begin(loader)
        self._put_back_random()
        self._watch.begin_batches(self.step, self.epoch, self._epoch_step, self._epochs, length)
        deterministic = options.deterministic
        limit = sys.maxsize if options.max_steps is None else options.max_steps
        heartbeat = self._heartbeat
        try:
            while self.step < limit:
                heartbeat(LOADING)
                batch = next(iterator, _END)
                if batch is _END:
                    return
                heartbeat(COMPUTING)
                if self._index == 0 and self._schedule is not None:
                    optim.apply(session.optimizers, self._schedule.factor(self.step))
                if deterministic:
                    micro_batch = self._index * world.world_size + world.rank
                    number = seeds.derive("step", options.seed, self.step, micro_batch)
                    random_states.seed(number, session.device, options.seed_everything)
                self._in_body = self._in_hand = True
                try:
                    yield batch
                finally:
                    self._in_body = False
                self._settle()
            self._cut_short = next(iterator, _END) is not _END
        finally:
            heartbeat(IDLE)
            self._paused = time.monotonic()
            self._watch.end_batches(self.step)

    def _begin(self, loader: Iterable[Any]) -> tuple[Iterator[Any], int | None]:
        """The batches that are left of this epoch, and how many steps a whole one has."""
        session = self._session
        options, batches = session.options, session.batches
        own = not isinstance(loader, data.Loader)
        if own:
            data.check_own(loader, options, batches, session.world.world_size)
            data.begin_own(loader, self.epoch, options.seed)
        length = data.steps_of_epoch(loader, batches.accumulate)
        steps = "some" if length is None else length
        self._heartbeat(WAITING)
        meet(session.backend, f"the batches of epoch {self.epoch}, {steps} steps")
        self._heartbeat(IDLE)
        self._plan(length)
        iterator = data.begin_epoch(
            loader, session.samplers, session.placement, self.epoch, self._batches
        )
        return (self._looked_at(iterator) if own else iterator), length

    def _look_around(self) -> None:
        """Before the first batches of a start: what the script has made, and on all ranks alike.

        Raises:
            UsageError: another rank has other data.
        """
        session = self._session
        self._find_schedulers()
        for name in self._left:
            logger.warning("the checkpoint has a %s, and this script has not", name)
        if session.backend.name == "horovod" and "torchmetrics" in sys.modules:
            logger.warning(
                "torchmetrics knows torch.distributed alone: over Horovod each rank computes from "
                "its own samples; session.sum(), or --backend ddp"
            )
        hosts = [session.roster.hosts[host] for host in session.roster.host_of_rank]
        prepare.refuse_other_data(session.backend, hosts, session.datasets)

    def _looked_at(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader of the script's own; the first one says what they are.

        Raises:
            UsageError: two ranks begin with the same one.
        """
        session, first = self._session, next(batches, _END)
        if not self._looked and session.world.world_size > 1 and not session.options.same_data:
            self._looked = True
            seen = session.backend.gather_object("" if first is _END else data.fingerprint(first))
            on_rank_zero(session.backend, lambda: data.refuse_same(seen))
        if first is _END:
            return
        count = data.samples(first)
        if count is not None:
            self._watch.see_samples(count)
        yield first
        yield from batches

    def stepping(self) -> None:
        """Called before the backward pass of a micro-batch.

        Raises:
            UsageError: it is none of `batches`.
        """
        if not self._in_body:
            raise UsageError(
                "session.step() outside of run.batches(): the run would count no step, and neither "
                "stop nor go on at the right sample",
                "the batches of a training by way of the run",
                "for batch in run.batches(loader): … session.step(loss)",
            )
        while self._later:
            self._later.pop().take_up()

    def stepped(self) -> None:
        """Called when an optimizer has stepped, or left out a step that overflowed.

        With several optimizers the first one of a micro-batch counts.
        """
        if self._stepped or not self._in_hand:
            return
        self._stepped = True
        assert self._watchdog is not None
        self.step = self._watchdog.step = self.step + 1
        self._epoch_step += 1

    def _settle(self) -> None:
        """Count the micro-batch that was handed out last, and see to the step that it has ended.

        A loop that is left by a break never asks for the next batch: then the next call of this
        run does it. (Closing a generator is no place for it: that also happens after an error.)
        """
        if not self._in_hand:
            return
        self._batches += 1
        self._index += 1
        session = self._session
        last = self._index == session.batches.accumulate
        if last and not self._stepped and not session.optimizers:
            self.stepped()  # without a prepared optimizer nobody else says so
        self._in_hand = False
        if not self._stepped:
            return
        self._stepped, self._index = False, 0
        # Not by the properties below, each of which is one more call in every step.
        journal, monitor, saving = self._journal, self._monitor, self._checkpoints
        assert journal is not None
        assert journal.metrics is not None
        assert monitor is not None
        assert saving is not None
        self._heartbeat(AGREEING)
        monitor.step(self.step)
        journal.metrics.end_step(self.step, self.epoch)
        if self.step % session.options.log_every == 0:
            self._end_row()
        heard = self._consensus.step()
        overdue = heard is not None and self._hear(heard)
        if overdue or saving.due(self.step):
            self.save()
        if self._compares:
            self._compares -= 1
            self._heartbeat(UPDATING)  # the ranks wait for each other, which AGREEING does not say
            refuse_unlike_weights(session, self.step)
        if self._stop is not None:
            self._stop_here()

    def _drop_rest(self) -> None:
        """Leave out micro-batches that make no step: no checkpoint could have their gradients."""
        self._index = 0
        dropped = self._session.forget_step()
        if dropped:
            logger.warning(
                "%d of %d micro-batches of a step are left out, as epoch %d or its loop ended "
                "there",
                dropped,
                self._session.batches.accumulate,
                self.epoch,
            )

    def _say(self) -> dict[str, float]:
        """What the other ranks have to know: why this one wants to stop, and what went wrong."""
        session = self._session
        asked = session.preemption.asked()
        self._metrics.offer()
        return {
            **{reason: float(reason == asked) for reason in REASONS},
            _NOT_FINITE: 1.0
            * (session.precision.nonfinite.streak >= session.options.max_nonfinite),
            _NOT_WRITTEN: float(self._saves.failed()),
            _OVERDUE: float(self._saves.overdue()),
            _MEASURED: float(self._watch.due()),
        }

    def _doing(self) -> str:
        """What this rank does, for people; all ranks do the same."""
        return f"step {self.step} of epoch {self.epoch}, logged {self._metrics.waiting()}"

    def _hear(self, heard: Mapping[str, float]) -> bool:
        """What follows from it, alike on all ranks; whether it is time for a checkpoint.

        Raises:
            NonFiniteError: the run goes nowhere.
        """
        for _ in range(self._consensus.heard):
            self._metrics.accept()
        if heard[_NOT_FINITE]:
            refuse_streak(self._session, heard[_NOT_FINITE], self.step, self._saves.saved)
        if heard[_NOT_WRITTEN]:
            self._saves.lost()
        if self._stop is None:
            self._stop = next((reason for reason in REASONS if heard[reason]), None)
        self._metrics.poll()
        self._watch.hear(heard[_MEASURED] > 0, self.step, self.epoch)
        return heard[_OVERDUE] > 0

    def _stop_here(self) -> None:
        """Save and leave, where the ranks have agreed to."""
        if self._stop is None:
            return
        reason, where = self._stop, "from here"
        if self._position() != self._saves.saved:
            self.save()
        self._heartbeat(SAVING)
        self._watch.finish(self.step, self.epoch)
        try:
            self._saves.finish()
        except ReplacedError:
            raise
        except CheckpointError as error:
            # Whoever runs it again loses some steps, and whoever does not loses more.
            self._saves.lost()
            saved = self._saves.saved
            where = f"from step {saved.step if saved else 0}"
            reason = f"{reason}; {error.found}"
        self._session.preemption.obeyed(self.directory)
        logger.info("stopped by %s at step %d; --resume goes on %s", self._stop, self.step, where)
        raise Stopped(f"{reason}, after step {self.step}", os.environ)

    def _save_margin(self) -> float:
        """Seconds before the end of the job's time at which to stop."""
        return self._pause + (
            self._checkpoints.save_margin() if self._checkpoints is not None else 0.0
        )

    def log(self, **values: Any) -> None:
        """Note numbers under names.

        Inside of `batches` they belong to the step of the batch. What is logged in every step makes
        a row each `--log-every` steps: its mean over these steps, their micro-batches and all
        ranks. What is logged now and then, as an evaluation every so many steps, is a row of its
        own with the number of that step, the mean over the ranks. Tensors stay on their device
        until they are needed. Outside of `batches` the values are a row of their own and have to be
        the same on all ranks, as an evaluation's totals are.

        Args:
            values: numbers, or tensors of one element; the same names on all ranks.

        Raises:
            UsageError: a value that is neither.
        """
        if not self._in_body:
            self._settle()
            self._metrics.write(self.step, self.epoch, values)
        else:
            self._metrics.add(values, self._session.weight)

    def save(self) -> None:
        """Take a checkpoint of all that makes the next step; called by all ranks.

        Rank 0 writes it while training goes on. When that fails, its log says so, and the
        checkpoints before are kept.

        Raises:
            UsageError: a step is under way, so weights and position would not belong together.
            NonFiniteError: the weights are not finite any more; the checkpoints before are kept.
        """
        if self._in_body and self._in_hand and not self._stepped:
            raise UsageError(
                "run.save() inside of run.batches(), where a step is under way",
                "a place between two steps",
                "if session.step(loss): run.save()    or --checkpoint-every STEPS",
            )
        self._settle()  # a loop that was left by a break
        if not self._in_body:
            self._drop_rest()
        self._heartbeat(WAITING)
        self._hear(self._consensus.now("a checkpoint"))
        self._heartbeat(SAVING)
        self._metrics.flush()
        self._saves.save(self._position(), self._metrics.at(self.step), self._metrics.state_dict())
        self._heartbeat(IDLE)

    def _position(self) -> Position:
        skipped = self._batches - self._epoch_step * self._session.batches.accumulate
        return Position(self.step, self.epoch, self._epoch_step, self._metrics.rows, skipped)

    def _put_back_random(self) -> None:
        """Let the random numbers of this rank go on where the checkpoint was taken."""
        if self._random is not None:
            random_states.put_back(self._random, self._session.device)
            self._random = None

    @property
    def _metrics(self) -> Metrics:
        assert self._journal is not None
        assert self._journal.metrics is not None
        return self._journal.metrics

    @property
    def _saves(self) -> CheckpointManager:
        assert self._checkpoints is not None
        return self._checkpoints

    @property
    def _watch(self) -> Monitor:
        assert self._monitor is not None
        return self._monitor

    def _enough(self) -> bool:
        limit = self._session.options.max_steps
        return limit is not None and self.step >= limit

    def _plan(self, length: int | None) -> None:
        """The course of the rate, which may need the number of steps in an epoch."""
        schedule = prepare.plan_schedule(self._session.options, length, self._epochs)
        if schedule is not None and schedule != self._schedule:
            prepare.refuse_second_schedule(self._session.optimizers)
            self._schedule = schedule
            logger.info("learning rate: %s", schedule.describe())

    def _end_row(self) -> None:
        session, tail = self._session, self._watch.lap(self.step)
        if session.optimizers:
            tail = {"lr": float(session.optimizers[0].param_groups[0]["lr"]), **tail}
        self._metrics.end_row(session.precision.numbers(), tail)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if code_of(error) == rundir.DONE:
                self._finish()
        except BaseException as late:
            self._close(late)
            raise
        self._close(error)

    def _finish(self) -> None:
        """The end of training: nothing of it is lost."""
        self._settle()
        self._drop_rest()
        saved = self._saves.saved
        if saved is None or self.step != saved.step:
            self.save()  # the loop was left by a break
        self._metrics.end_row()
        self._heartbeat(WAITING)
        self._hear(self._consensus.now("the end of the run"))
        self._heartbeat(SAVING)
        self._metrics.flush()
        self._watch.finish(self.step, self.epoch)
        self._saves.finish()

    def _close(self, error: BaseException | None) -> None:
        """Let go of everything; what is being written gets written.

        Each part has its turn whatever becomes of those before it. The directory is summed up and
        unlocked before anybody waits for a tracker; a signal then ends that wait.
        """
        self._session.heartbeat, self._session.loop = ignore, None
        with ExitStack() as turns:  # the last one comes first
            turns.callback(self._undo.close)
            if self._journal is not None:
                turns.callback(self._journal.drop_logs)
            if self._monitor is not None:
                turns.callback(self._monitor.close_trackers, code_of(error))
            turns.callback(self._session.preemption.end)
            if self._journal is not None:
                turns.callback(self._journal.close, error, self._facts)
            if self._monitor is not None:
                turns.callback(self._monitor.close, self.step)
            if self._watchdog is not None:
                turns.callback(self._watchdog.close)
            if self._checkpoints is not None:
                turns.callback(self._checkpoints.close)

    def _facts(self) -> dict[str, Any]:
        """How far it came, and how fast."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            **(self._monitor.facts() if self._monitor is not None else {}),
            "learning_rate": self._schedule.describe() if self._schedule else "constant",
        }


# Where the script has no name of its own: in an interpreter, by -c, from a pipe, in a notebook.
_UNNAMED = {"": "run", "-c": "run", "-": "run", "ipykernel_launcher": "notebook"}

# A mistake in a loop shows at once; later the checkpoints are looked at.
_FIRST_STEPS = 2

# What the ranks tell each other besides the reasons to stop.
_NOT_FINITE, _NOT_WRITTEN = "not finite", "not written"
_OVERDUE, _MEASURED = "overdue", "measured"

_END = object()


def ignore(phase: int) -> None:
    """Nobody watches."""
