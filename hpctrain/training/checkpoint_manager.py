"""Checkpoints of a run: when to save, which ranks write, and what a failed write means."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from torch import nn

from hpctrain.checkpoint import Team, Writer, covering, process_name
from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import ReplacedError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training import identity
from hpctrain.training.consensus import on_all_ranks, on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.journal import RunJournal
from hpctrain.training.replica_check import ReplicaCheck
from hpctrain.training.sharded_state import held
from hpctrain.training.state import Position, gather, refuse_nonfinite, warn_of_unlike

__all__ = ["CheckpointManager", "Spacing"]

# Assumed duration of the first save.
_SECONDS_OF_A_SAVE = 10.0
_MARGIN_SECONDS = 5.0

# Without an interval, saves stall the training for at most this share of the time. The time between
# two saves has limits: the lower one protects the file system from small models.
_SHARE = 0.005
_MIN_SECONDS, _MAX_SECONDS = 10.0, 600.0
_STALL_OF_FIRST_SAVE = 0.3  # assumed, so that the first save comes after a minute


class Spacing:
    """Distance of checkpoints without an interval, from the time that each save has cost.

    Args:
        clock: function that returns seconds; tests replace it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._last = clock()
        self._stall, self._total = _STALL_OF_FIRST_SAVE, 0.0

    def due(self) -> bool:
        """Check whether the next save is due: its cost fits, or the last one is long ago."""
        now = self._clock()
        since = now - self._last
        fits = now - self._begun >= (self._total + self._stall) / _SHARE
        fits = fits and since >= max(_MIN_SECONDS, self._stall / _SHARE)
        return fits or since >= _MAX_SECONDS

    def saved(self, seconds: float) -> None:
        """Record a save, and how many seconds the training has waited for it."""
        self._stall, self._last = seconds, self._clock()
        self._total += seconds


class CheckpointManager:
    """Manager of a run's checkpoints: all ranks collect their states, and write them later.

    Args:
        context: context of the training.
        replicas: check that all ranks have the same state.
        others: objects that the user added to the state, by name.
        journal: journal of the run, with its directory and the lock on it.
        saved: newest position on the disk at which the run was resumed; None for a new run.

    Attributes:
        saved: newest position whose state is on the disk or being written there.
        at_epochs: whether each epoch ends with a save: if an interval is given, or if the best
            checkpoint is kept.
    """

    def __init__(
        self,
        context: Context,
        replicas: ReplicaCheck,
        others: Mapping[str, Any],
        journal: RunJournal,
        saved: Position | None,
    ) -> None:
        self._context, self._others = context, others
        self._facts = identity.facts(journal.directory, context.world)
        self._replicas = replicas
        self._warned = False  # whether the states of objects were compared between the ranks
        self.saved = saved
        # By step; None stands for the beginning of this start.
        self._taken: dict[int | None, Position | None] = {None: saved}
        self._replaced: ReplacedError | None = None
        options, lock = context.options, journal.lock
        self._writer = Writer(
            journal.directory,
            keep=options.keep_checkpoints,
            best=options.keep_best,
            commit=nullcontext if lock is None else lock.commit,
            team=_team(context, journal.directory),
        )
        every, minutes = options.checkpoint_every, options.checkpoint_minutes
        self._spacing = Spacing() if every is None and minutes is None else None
        self.at_epochs = self._spacing is None or options.keep_best is not None
        self._since = time.monotonic()

    def due(self, step: int) -> bool:
        """Check whether --checkpoint-every requires a save at this step; the same on all ranks."""
        every = self._context.options.checkpoint_every
        return every is not None and step % every == 0

    def overdue(self) -> bool:
        """Check whether the time for a save has come; only rank 0 can return True."""
        if self._context.world.rank > 0:
            return False
        if self._spacing is not None:
            return self._spacing.due()
        minutes = self._context.options.checkpoint_minutes
        return minutes is not None and time.monotonic() - self._since >= 60 * minutes

    def failed(self) -> bool:
        """Check whether a write has failed; only rank 0 can return True, once for each failure."""
        # Rank 0 knows why another rank has not written its part.
        failure = self._writer.failure() if self._context.world.rank == 0 else None
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
            return self._writer.committed

        step = on_rank_zero(self._context.backend, look)
        if self._context.world.rank > 0:
            logger.info("rank 0 could not write a checkpoint; its log says why")
        self.saved = self._taken.get(step, self._taken[None])

    def save_margin(self) -> float:
        """Return how many seconds a save may take at rank 0, with a margin."""
        seconds = self._writer.seconds
        return _MARGIN_SECONDS + 2 * (seconds if seconds is not None else _SECONDS_OF_A_SAVE)

    def save(
        self, position: Position, metrics: Mapping[str, float], log: Mapping[str, Any]
    ) -> None:
        """Collect everything that determines the next step; the ranks write it during training.

        Called by all ranks, between two steps.

        Args:
            position: position of the run.
            metrics: metrics of this step.
            log: values that this rank has logged for the next row of metrics.

        Raises:
            NonFiniteError: the weights are no longer finite.
            UsageError: the ranks never had the same weights, or a state holds a value that cannot
                be loaded again.
            ReplicaError: the ranks do not have the same weights any more.
        """
        context, begun = self._context, time.monotonic()
        refuse_nonfinite(context, position.step)
        self._settle()
        self._replicas.compare(position.step)
        if not self._warned and context.world.world_size > 1:
            self._warned = True
            warn_of_unlike(context, self._others)
        state = gather(context, self._others, position, log)
        own = {"time": time.time(), "metrics": dict(metrics), "frozen": _frozen(context.models)}
        facts = {**self._facts, **own}
        parts, extents = held(context, state)
        prepare = partial(self._writer.prepare, position.step, parts, facts, extents)
        self._writer.start(on_all_ranks(context.backend, prepare))
        self.saved = position
        self._taken[position.step] = position
        self._since = time.monotonic()
        if self._spacing is not None:
            self._spacing.saved(self._since - begun)

    def finish(self) -> None:
        """Wait until the newest checkpoint is written; called by all ranks.

        Raises:
            CheckpointError: the write failed.
        """
        self._settle()
        on_rank_zero(self._context.backend, self._writer.wait)

    def _settle(self) -> None:
        """Wait until all ranks have written their parts of the save before."""
        self._writer.settle()
        self._context.backend.barrier()
        self._writer.all_written()

    def close(self) -> None:
        """Complete the write that is under way, and end the writer."""
        self._writer.close()


def _team(context: Context, directory: RunDirectory) -> Team | None:
    """Return the ranks that write checkpoints: those which see the run directory of rank 0.

    Called by all ranks.

    Raises:
        UsageError: each rank holds a part, and one of them does not see the directory.
    """
    backend, hosts = context.backend, context.roster.host_names
    if backend.world_size == 1:
        return None
    nonce = secrets.token_hex(8)
    name, nonce = backend.broadcast_object((process_name(), nonce))
    able: Sequence[int] = range(backend.world_size)
    if len(set(hosts)) > 1:
        probe = directory.path / f".seen-{nonce}"
        if backend.rank == 0:
            with suppress(OSError):  # the first save will say why
                probe.touch()
        backend.barrier()
        sees = False
        with suppress(OSError):
            sees = probe.exists() and os.access(probe.parent, os.W_OK)
        seen = backend.gather_object(sees)
        if backend.rank == 0:
            probe.unlink(missing_ok=True)
        able = backend.broadcast_object([rank for rank, sees in enumerate(seen) if sees]) or able
    blind = sorted(set(range(backend.world_size)).difference(able))
    if blind and backend.sharded:
        raise UsageError(
            "HT622.run-dir-not-shared", ranks=ranks_text(blind, hosts), directory=directory
        ).of_all(backend.rank)
    return Team(backend.rank, able, backend.sharded, name, nonce)


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
