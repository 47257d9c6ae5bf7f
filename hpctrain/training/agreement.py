"""Agreement of the ranks of a run: why they stop, what is due, what has failed on one of them."""

from collections.abc import Mapping
from typing import Any

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
_NOT_FINITE, _NOT_WRITTEN, _NO_ROOM = "not finite", "not written", "no room"
_OVERDUE, _MEASURED, _ASKING = "overdue", "measured", "asking"


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
            seconds.
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
        self.longest_pause = 0.0

    def step(self, step: int, epoch: int) -> bool:
        """Act on the sums that are complete, and begin the next ones; called by all ranks.

        Args:
            step, epoch: position of the run.

        Returns:
            Whether a checkpoint is due.

        Raises:
            NonFiniteError: too many steps in a row had no finite numbers.
            ReplicaError: the ranks do not have the same weights any more.
        """
        values = {**self._values(), **self._replicas.values(step)}
        sums = self._consensus.step(values, self._doing(step, epoch))
        return sums is not None and self._act_on(sums, step, epoch)

    def now(self, what: str, step: int, epoch: int) -> bool:
        """Wait for all ranks, and act on their values.

        Args:
            what: purpose of the exchange, for error messages.
            step, epoch: position of the run.

        Returns:
            Whether a checkpoint is due.

        Raises:
            NonFiniteError, ReplicaError: as for `step`.
        """
        doing = self._doing(step, epoch)
        meet(self._context.backend, f"{what}, {doing}")
        return self._act_on(self._consensus.now(self._values(), doing), step, epoch)

    def _values(self) -> dict[str, Any]:
        """Return this rank's values: stop requests, failures, what is due."""
        context, saves = self._context, self._saves
        asked = context.preemption.asked(self.longest_pause + saves.save_margin())
        self._metrics.offer()
        streak = context.precision.nonfinite.streak
        return {
            **{reason: float(reason == asked) for reason in REASONS},
            _ASKING: float(context.world.rank if asked else 0),
            # Not float(): on a GPU it is a tensor, which stays there.
            _NOT_FINITE: 1.0 * (streak >= context.options.max_nonfinite),
            _NOT_WRITTEN: float(saves.failed()),
            _NO_ROOM: float(saves.no_room()),
            _OVERDUE: float(saves.overdue()),
            _MEASURED: float(self._timings.due()),
        }

    def _doing(self, step: int, epoch: int) -> str:
        """Describe what this rank does, for error messages; the same on all ranks."""
        return f"step {step} of epoch {epoch + 1}, logged {self._metrics.waiting()}"

    def _act_on(self, sums: Mapping[str, float], step: int, epoch: int) -> bool:
        """Act on the sums, in the same way on all ranks; return whether a checkpoint is due."""
        for _ in range(self._consensus.received):
            self._metrics.accept()
        self._replicas.judge(sums)
        if sums[_NOT_FINITE]:
            refuse_streak(self._context, sums[_NOT_FINITE], step, self._saves.saved)
        if sums[_NOT_WRITTEN]:
            self._saves.lost()
        if sums[_NO_ROOM]:
            self._saves.end_memory()
        if self.stop is None:
            self.stop = next((reason for reason in REASONS if sums[reason]), None)
            ranks = sum(map(sums.__getitem__, REASONS))
            if self.stop and self.stop.startswith("SIG") and ranks == 1:
                self.asking = f" (rank {sums[_ASKING]:.0f})"
        self._metrics.poll()
        self._timings.poll()
        if sums[_MEASURED]:
            self._timings.begin(step, epoch)
        return sums[_OVERDUE] > 0
