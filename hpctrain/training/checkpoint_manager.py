"""When a run saves, who writes, and what follows when that fails."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from hpctrain.checkpoint import Writer
from hpctrain.errors import ReplacedError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.lock import Lock
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.replica_check import refuse_unlike_weights
from hpctrain.training.state import Parts, Position, gather, refuse_nonfinite

__all__ = ["CheckpointManager"]

# Before the first save its duration is a guess.
_SECONDS_OF_A_SAVE = 10.0
_MARGIN_SECONDS = 5.0


class CheckpointManager:
    """The checkpoints of a run: states come together at a step's end, rank 0 writes them later.

    Args:
        parts: the session.
        others: what the user added to its state.
        directory: of the run.
        lock: on it; at rank 0.
        facts: for the manifests; JSON values.
        saved: the position that the run was resumed at; None at its beginning.

    Attributes:
        saved: the newest position whose state is kept or being written.
    """

    def __init__(
        self,
        parts: Parts,
        others: Mapping[str, Any],
        directory: RunDirectory,
        lock: Lock | None,
        facts: Mapping[str, Any],
        saved: Position | None,
    ) -> None:
        self._parts, self._others, self._facts = parts, others, facts
        self.saved = saved
        self._first = saved
        self._taken: list[Position] = []  # since then, the newest last
        self._replaced: ReplacedError | None = None
        self._writer: Writer | None = None
        if lock is not None:
            options = parts.options
            self._writer = Writer(
                directory,
                keep=options.keep_checkpoints,
                best=options.keep_best,
                commit=lock.commit,
            )
        self._since = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether --checkpoint-every asks for one at this step; the same on all ranks."""
        every = self._parts.options.checkpoint_every
        return every is not None and step % every == 0

    def overdue(self) -> bool:
        """Whether --checkpoint-minutes have gone by, at rank 0; the others have to be told."""
        minutes = self._parts.options.checkpoint_minutes
        if self._writer is None or minutes is None:
            return False
        return time.monotonic() - self._since >= 60 * minutes

    def failed(self) -> bool:
        """Whether a write has failed, at rank 0; said once, and the others have to be told."""
        failure = self._writer.failure() if self._writer is not None else None
        if isinstance(failure, ReplacedError):
            self._replaced = failure
        return failure is not None

    def lost(self) -> None:
        """All ranks know of a failed write. Training goes on: the checkpoints before are safe.

        Raises:
            ReplacedError: another start has the directory, so it goes on there.
        """

        def look() -> int | None:
            if self._replaced is not None:
                raise self._replaced
            return self._writer.committed if self._writer is not None else None

        step = on_rank_zero(self._parts.backend, look)
        if self._writer is None:
            logger.warning("rank 0 could not write a checkpoint; its log says why")
        written = [one for one in self._taken if step is not None and one.step == step]
        self.saved = written[-1] if written else self._first

    def save_margin(self) -> float:
        """Seconds that a save may take, with some to spare; at rank 0."""
        seconds = self._writer.seconds if self._writer is not None else None
        return _MARGIN_SECONDS + 2 * (seconds if seconds is not None else _SECONDS_OF_A_SAVE)

    def save(
        self, position: Position, metrics: Mapping[str, float], log: Mapping[str, Any]
    ) -> None:
        """Take all that makes the next step; rank 0 writes it while training goes on.

        Called by all ranks, between two steps.

        Args:
            position: of the run.
            metrics: known at this step.
            log: what this rank has of the next row of metrics.

        Raises:
            NonFiniteError: the weights are not finite any more.
            UsageError: the ranks do not have the same weights, or a state holds what cannot be
                loaded again.
        """
        parts = self._parts
        refuse_nonfinite(parts, position.step)
        refuse_unlike_weights(parts, position.step)
        with nullcontext() if parts.ema is None else parts.ema.original():
            state = gather(parts, self._others, position, log)

            def write() -> None:
                if self._writer is not None and state is not None:
                    facts = {**self._facts, "time": time.time(), "metrics": dict(metrics)}
                    self._writer.save(position.step, state, facts)

            on_rank_zero(parts.backend, write)
        self.saved = position
        self._taken = [*self._taken[-2:], position]
        self._since = time.monotonic()

    def finish(self) -> None:
        """Wait until the newest checkpoint is written; called by all ranks.

        Raises:
            CheckpointError: it could not be.
        """
        on_rank_zero(self._parts.backend, self._writer.wait if self._writer else lambda: None)

    def close(self) -> None:
        """End the writer; what it is at gets written."""
        if self._writer is not None:
            self._writer.close()
