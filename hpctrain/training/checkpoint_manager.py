"""Checkpoints of a run: when to save, which rank writes, and what a failed write means."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from torch import nn

from hpctrain.checkpoint import Writer, covering
from hpctrain.errors import ReplacedError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.lock import Lock
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.memory_copies import MemoryCopies
from hpctrain.training.replica_check import ReplicaCheck
from hpctrain.training.state import Position, gather, refuse_nonfinite

__all__ = ["CheckpointManager"]

# Assumed duration of the first save.
_SECONDS_OF_A_SAVE = 10.0
_MARGIN_SECONDS = 5.0


class CheckpointManager:
    """Manager of a run's checkpoints: all ranks collect their states, rank 0 writes them later.

    Args:
        context: context of the training.
        replicas: check that all ranks have the same state.
        others: objects that the user added to the state, by name.
        directory: run directory.
        lock: lock on the run directory at rank 0; None on the other ranks.
        facts: JSON values for the manifests.
        saved: newest position on the disk at which the run was resumed; None for a new run.
        memory: copies in memory; None without them.

    Attributes:
        saved: newest position whose state is on the disk or being written there.
        memory_every: steps between two copies in memory; 0 for none.
    """

    def __init__(
        self,
        context: Context,
        replicas: ReplicaCheck,
        others: Mapping[str, Any],
        directory: RunDirectory,
        lock: Lock | None,
        facts: Mapping[str, Any],
        saved: Position | None,
        memory: MemoryCopies | None = None,
    ) -> None:
        self._memory = memory
        self.memory_every = 0 if memory is None else context.options.memory_checkpoint_every
        self._context, self._others, self._facts = context, others, facts
        self._replicas = replicas
        self.saved = saved
        self._first = saved
        self._taken: list[Position] = []  # positions saved since then, the newest last
        self._replaced: ReplacedError | None = None
        self._writer: Writer | None = None
        if lock is not None:
            options = context.options
            self._writer = Writer(
                directory,
                keep=options.keep_checkpoints,
                best=options.keep_best,
                commit=lock.commit,
            )
        self._since = time.monotonic()

    def due(self, step: int) -> bool:
        """Check whether --checkpoint-every requires a save at this step; the same on all ranks."""
        every = self._context.options.checkpoint_every
        return every is not None and step % every == 0

    def overdue(self) -> bool:
        """Check whether --checkpoint-minutes have passed; only rank 0 can return True."""
        minutes = self._context.options.checkpoint_minutes
        if self._writer is None or minutes is None:
            return False
        return time.monotonic() - self._since >= 60 * minutes

    def failed(self) -> bool:
        """Check whether a write has failed; only rank 0 can return True, once for each failure."""
        failure = self._writer.failure() if self._writer is not None else None
        if isinstance(failure, ReplacedError):
            self._replaced = failure
        return failure is not None

    def lost(self) -> None:
        """Handle a failed write on all ranks; training continues, as earlier checkpoints are safe.

        Raises:
            ReplacedError: another start has taken over the directory, and the run continues there.
        """

        def look() -> int | None:
            if self._replaced is not None:
                raise self._replaced
            return self._writer.committed if self._writer is not None else None

        step = on_rank_zero(self._context.backend, look)
        if self._writer is None:
            logger.warning("rank 0 could not write a checkpoint; its log says why")
        written = [one for one in self._taken if step is not None and one.step == step]
        self.saved = written[-1] if written else self._first

    def no_room(self) -> bool:
        """Check whether this host has no room for copies in memory."""
        return self._memory is not None and self._memory.full()

    def end_memory(self) -> None:
        """Keep no more copies in memory, and free those that are there."""
        if self._memory is not None:
            self._memory.close(remove=True)
        self._memory, self.memory_every = None, 0

    def save_margin(self) -> float:
        """Return how many seconds a save may take at rank 0, with a margin."""
        seconds = self._writer.seconds if self._writer is not None else None
        return _MARGIN_SECONDS + 2 * (seconds if seconds is not None else _SECONDS_OF_A_SAVE)

    def save(
        self,
        position: Position,
        metrics: Mapping[str, float],
        log: Mapping[str, Any],
        to_disk: bool = True,
    ) -> None:
        """Collect everything that determines the next step; rank 0 writes it during training.

        So does the first rank of each host, to memory. Called by all ranks, between two steps.

        Args:
            position: position of the run.
            metrics: metrics of this step.
            log: values that this rank has logged for the next row of metrics.
        to_disk: whether it is written to the disk, and not to memory alone.

        Raises:
            NonFiniteError: the weights are no longer finite.
            UsageError: the ranks never had the same weights, or a state holds a value that cannot
                be loaded again.
            ReplicaError: the ranks do not have the same weights any more.
        """
        context = self._context
        refuse_nonfinite(context, position.step)
        with nullcontext() if context.ema is None else context.ema.original():
            self._replicas.compare(position.step)
            state = gather(context, self._others, position, log, self._memory is not None)

            def write() -> None:
                if state is None:
                    return
                facts = {**self._facts, "time": time.time(), "metrics": dict(metrics)}
                facts |= {"frozen": _frozen(context.models)}
                if self._writer is not None and to_disk:
                    self._writer.save(position.step, state, facts)
                if self._memory is not None:
                    self._memory.save(position.step, state, facts)

            if context.world.rank > 0:
                with suppress(UsageError):  # rank 0 raises the same
                    write()
            on_rank_zero(context.backend, write)
        if not to_disk:
            return
        self.saved = position
        self._taken = [*self._taken[-2:], position]
        self._since = time.monotonic()

    def finish(self) -> None:
        """Wait until the newest checkpoint is written; called by all ranks.

        Raises:
            CheckpointError: the write failed.
        """
        on_rank_zero(self._context.backend, self._writer.wait if self._writer else lambda: None)

    def close(self, done: bool) -> None:
        """Complete the writes that are under way, and end the writers.

        Args:
            done: whether the run has ended, or was stopped; then copies in memory are freed.
        """
        if self._writer is not None:
            self._writer.close()
        if self._memory is not None:
            self._memory.close(remove=done)


def _frozen(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the parameters without a gradient, as patterns of names, and their number of all."""
    several = len(models) > 1
    trained = {
        f"model{number}.{name}" if several else name: parameter.requires_grad
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
    frozen = [name for name, requires_grad in trained.items() if not requires_grad]
    return {"count": len(frozen), "of": len(trained), "parameters": covering(frozen, trained)}
