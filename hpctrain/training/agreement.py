"""Agreement of the ranks of a run: why they stop, what is due, what has failed on one of them."""

from collections.abc import Mapping
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.monitoring.timings import Timings
from hpctrain.training.checkpoint_manager import CheckpointManager
from hpctrain.training.consensus import Consensus, meet
from hpctrain.training.context import Context
from hpctrain.training.metrics import Metrics
from hpctrain.training.preemption import REASONS
from hpctrain.training.replica_check import ReplicaCheck
from hpctrain.training.state import refuse_streak

__all__ = ["Agreement"]

# Names of the values that the ranks exchange besides the reasons to stop.
_NOT_FINITE, _NOT_WRITTEN = "not finite", "not written"
_OVERDUE, _MEASURED, _ASKING = "overdue", "measured", "asking"
_CALLS, _CALLS_SQUARED = "calls", "calls squared"
_LONG_PAUSES = "long pauses"

# An evaluation of this many seconds is longer than the wait between SIGTERM and SIGKILL may be.
_LONG_PAUSE = 10.0


class Agreement:
    """What all ranks of a run decide at the same step, each from the sums of the values of all.

    Args:
        context: context of the training.
        metrics, replicas, saves, timings: parts of the run, which act on the decisions.

    Attributes:
        due: counts a step, and returns whether `step` is due; see `Consensus.due`.
        stop: why all ranks stop; None to go on.
        asking: the rank that asked for it, as a part of a message, if only one did.
        longest_pause: longest time from the last batch of an epoch to the save after it, in
            seconds; None before the first one.
        long_pauses: whether such a pause takes long at rank 0, or may do so: a script that has a
            loader for evaluations has not had one yet.
    """

    def __init__(
        self,
        context: Context,
        metrics: Metrics,
        replicas: ReplicaCheck,
        saves: CheckpointManager,
        timings: Timings,
    ) -> None:
        self._context, self._metrics, self._replicas = context, metrics, replicas
        self._saves, self._timings = saves, timings
        self._consensus = Consensus(context.backend)
        self.due = self._consensus.due  # a step calls it without a function in between
        self.stop: str | None = None
        self.asking = ""
        self.longest_pause: float | None = None
        self.long_pauses = False

    def step(self, step: int, epoch: int) -> bool:
        """Act on the sum that is complete, and begin the next one; called by all ranks.

        Args:
            step, epoch: position of the run.

        Returns:
            Whether a checkpoint is due.

        Raises:
            NonFiniteError: too many steps in a row had no finite numbers.
            ReplicaError: the ranks do not have the same weights any more.
            UsageError: they have called the blocks of a model in different orders.
        """
        overdue = self._act(step, epoch)
        self._begin({**self._values(), **self._replicas.values(step)}, step, epoch)
        # A single rank reads its sum at once, unless a GPU still has to compute it.
        if self._context.world.world_size == 1 and self._consensus.ready:
            overdue |= self._act(step, epoch)
        return overdue

    def now(self, what: str, step: int, epoch: int) -> bool:
        """Wait for all ranks, act on their values, and write all rows of metrics.

        Args:
            what: purpose of the exchange, for error messages.
            step, epoch: position of the run.

        Returns:
            Whether a checkpoint is due.

        Raises:
            NonFiniteError, ReplicaError: as for `step`.
        """
        meet(self._context.backend, f"{what}, {self._doing(step, epoch)}")
        overdue = self._act(step, epoch)
        self._begin(self._values(), step, epoch)
        overdue |= self._act(step, epoch)
        if self._metrics.confirmed:
            self._begin({}, step, epoch)
            self._act(step, epoch)
        return overdue

    def _begin(self, values: Mapping[str, Any], step: int, epoch: int) -> None:
        """Begin a sum with these values, and with the rows of metrics that are confirmed."""
        totals = self._metrics.offer()
        self._consensus.begin(values, self._doing(step, epoch), totals)

    def _values(self) -> dict[str, Any]:
        """Return this rank's values: stop requests, failures, what is due."""
        context, saves = self._context, self._saves
        asked = context.preemption.asked((self.longest_pause or 0.0) + saves.save_margin())
        streak, calls = context.precision.nonfinite.streak, context.backend.call_order
        return {
            **{reason: float(reason == asked) for reason in REASONS},
            _ASKING: float(context.world.rank if asked else 0),
            # Not float(): on a GPU it is a tensor, which stays there.
            _NOT_FINITE: 1.0 * (streak >= context.options.max_nonfinite),
            _NOT_WRITTEN: float(saves.failed()),
            _OVERDUE: float(saves.overdue()),
            _MEASURED: float(self._timings.due()),
            _LONG_PAUSES: float(context.world.rank == 0 and self._pauses_long()),
            _CALLS: float(calls),
            _CALLS_SQUARED: float(calls * calls),
        }

    def _pauses_long(self) -> bool:
        if self.longest_pause is None:
            return len(self._context.datasets) > len(self._context.samplers)
        return self.longest_pause >= _LONG_PAUSE

    def _doing(self, step: int, epoch: int) -> str:
        """Describe what this rank does, for error messages; the same on all ranks."""
        return f"step {step} of epoch {epoch + 1}, logged {self._metrics.waiting()}"

    def _act(self, step: int, epoch: int) -> bool:
        """Act on the sum under way, if any, alike on all ranks; return if a checkpoint is due."""
        read = self._consensus.read()
        if read is None:
            return False
        sums, totals = read
        self._metrics.accept(totals)
        self._replicas.judge(sums)
        if not sums:
            return False
        # As for `Consensus`: equal numbers are those whose squares have the least sum.
        if sums[_CALLS] ** 2 != sums[_CALLS_SQUARED] * self._context.world.world_size:
            raise UsageError("HT319.calls-differ", step=step)
        if sums[_NOT_FINITE]:
            refuse_streak(self._context, sums[_NOT_FINITE], step, self._saves.saved)
        if sums[_NOT_WRITTEN]:
            self._saves.lost()
        if self.stop is None:
            self.stop = next((reason for reason in REASONS if sums[reason]), None)
            ranks = sum(map(sums.__getitem__, REASONS))
            if self.stop and self.stop.startswith("SIG") and ranks == 1:
                self.asking = f" (rank {sums[_ASKING]:.0f})"
        self.long_pauses = sums[_LONG_PAUSES] > 0
        self._timings.poll()
        if sums[_MEASURED]:
            self._timings.begin(step, epoch)
        return sums[_OVERDUE] > 0
