"""Copies of the state in the memory of each host, for the next attempt of `hpctrain run`.

A copy is a checkpoint as on the disk, in the folder of `process/shared_memory`. The first rank of
each host writes it. The state is the same on all hosts, so any of them can give it to the others.

Over a backend that divides the state, each rank writes its own part, and reads it again: a copy
counts if every rank has its part of it, on the same host as before.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import Writer, open_checkpoint, places
from hpctrain.cluster import env_vars
from hpctrain.cluster.memory import available
from hpctrain.errors import CheckpointError
from hpctrain.process import failure_record, shared_memory
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training import identity
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context

__all__ = ["MemoryCopies"]

# Share of the free memory that a copy may use: loader workers and NCCL use shared memory, too.
_SHARE = 0.9


class MemoryCopies:
    """Copies of the state of a run in the memory of the hosts.

    Args:
        context: context of the training.
        directory: run directory.
        env: environment variables, for $HPCTRAIN_MEMORY, $HPCTRAIN_START and $HPCTRAIN_EVIDENCE.
    """

    def __init__(self, context: Context, directory: RunDirectory, env: Mapping[str, str]) -> None:
        world = context.world
        assert world.hosts is not None
        assert world.node_rank is not None
        self._backend, self._directory, self._env = context.backend, directory, env
        self._run = identity.of_run(directory)
        self._folder = Path(env[env_vars.MEMORY])
        self._divided = context.backend.sharded
        host = world.hosts[world.node_rank]
        # A part is of a rank among so many, and of no other one.
        self._part = [world.rank, world.world_size] if self._divided else None
        self._beside = (world.local_world_size or 1) if self._divided else 1  # that write here
        whose = f"{host}-{world.rank}" if self._divided else host
        self._place = RunDirectory(shared_memory.place_in(self._folder, whose, directory.path))
        self._launch, _, attempt = env.get(env_vars.START, "").partition("/")
        self._attempt = int(attempt or 0)
        # Whether this rank writes copies: those of its host, or of its part of the state.
        self._writes = world.local_rank == 0 or self._divided
        self._writer: Writer | None = None
        self._step = 0  # step of the copy that is being written
        self._full = False  # whether a copy could not be written
        self._loaded: tuple[int, dict[str, Any]] | None = None
        self._steps: Sequence[int] = ()  # of what each rank has loaded; -1 for nothing

    @classmethod
    def of_run(
        cls, context: Context, directory: RunDirectory, env: Mapping[str, str]
    ) -> "MemoryCopies | None":
        """Return the copies of a run; None if there are none to be.

        Args:
            context, directory, env: as for the class.
        """
        if not context.options.memory_checkpoint_every:
            return None
        if not env.get(env_vars.MEMORY):
            if context.world.rank == 0:
                logger.warning(
                    "--memory-checkpoint-every has no effect here: only hpctrain run in a job "
                    "starts ranks again on the same hosts"
                )
            return None
        return cls(context, directory, env)

    def newest(self) -> int | None:
        """Load the newest whole copy of any host, and return its step; called by all ranks."""
        starts = on_rank_zero(self._backend, self._starts)
        found = places(self._place)
        if self._divided:
            everywhere = self._backend.gather_object(set(found))
            common = on_rank_zero(self._backend, lambda: set.intersection(*everywhere))
            found = {step: found[step] for step in sorted(common)}
        self._loaded = self._load(starts, found)
        own = -1 if self._loaded is None else self._loaded[0]
        self._steps = self._backend.broadcast_object(self._backend.gather_object(own))
        step = max(self._steps)
        return None if step < 0 or (self._divided and min(self._steps) < step) else step

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the copy that `newest` has found; called by all ranks.

        Args:
            step: result of `newest`.
        """
        own = self._loaded[1] if self._loaded and self._loaded[0] == step else {}
        if min(self._steps) == step:
            return own
        # Part by part, because each is pickled as a whole.
        source, share = self._steps.index(step), self._backend.broadcast_object
        return {part: share(own.get(part), source) for part in share(list(own), source)}

    def keep_only(self, step: int | None) -> None:
        """Remove the copies of other steps than that at which this start goes on."""
        self._loaded = None
        for number, folder in places(self._place).items() if self._writes else ():
            if number != step:
                shutil.rmtree(folder, ignore_errors=True)

    def save(self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Copy the state if this rank writes copies; a thread writes it to the host's memory.

        A failure is logged, and `full` returns it.

        Args:
            step, state, facts: as for `Writer.save`.

        Raises:
            UsageError: the state contains values that cannot be loaded again.
        """
        if self._full or not self._writes:
            return
        try:
            if self._writer is None:
                shared_memory.make(self._folder)
                # A rank may have completed its part when another one ends: then both have the
                # part before.
                keep = 2 if self._divided else 1
                self._writer = Writer(self._place, keep=keep, commit=self._commit, room=self._room)
            self._writer.wait()
            self._step = step
            own = {"attempt": self._attempt, "part": self._part}
            self._writer.save(step, state, {**facts, **own})
        except (OSError, CheckpointError) as error:
            self._give_up(error)

    def full(self) -> bool:
        """Return whether the copies of this host cannot be written."""
        failure = self._writer.failure() if self._writer is not None else None
        if failure is not None:
            self._give_up(failure)
        return self._full

    def close(self, remove: bool) -> None:
        """Complete the write that is under way.

        Args:
            remove: whether no attempt will need the copies, so that their memory is freed.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if remove and self._writes:
            shared_memory.remove(self._place.path)
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # other hosts or runs may be in it

    def _give_up(self, error: OSError | CheckpointError) -> None:
        if not self._full:
            reason = error.found if isinstance(error, CheckpointError) else error
            logger.warning("no more copies of the state are kept in memory: %s", reason)
        self._full = True

    @contextlib.contextmanager
    def _commit(self) -> Iterator[None]:
        yield
        if self._backend.rank == 0 and self._writer is not None and self._writer.committed is None:
            failure_record.note_memory(self._step, self._env)

    def _room(self, size: int) -> None:
        """Check the memory for a state: the shared one, and that of the job, which has it, too.

        The copies before stay until the new one is complete.
        """
        size *= self._beside
        first = not places(self._place)
        usage, left = shutil.disk_usage(self._folder), available()
        # A first one is followed by a second. The copy in the buffers of the writer is new, too.
        for what, needed, free in (
            (str(self._folder.parent), (1 + first) * size, usage.free if usage.total else None),
            ("the memory of the job", (1 + 2 * first) * size, left),
        ):
            if free is not None and needed > _SHARE * free:
                raise CheckpointError(
                    "HT705.memory-full", needed_mb=needed / 1e6, place=what, free_mb=free / 1e6
                )

    def _starts(self) -> list[tuple[int, int]]:
        """Return attempt and first step of the starts of this launch."""
        found = []
        for line in self._directory.lines(self._directory.starts):
            launch, _, attempt = (line.get("start") or "").partition("/")
            if launch == self._launch:
                found.append((int(attempt or 0), line["step"]))
        return found

    def _load(
        self, starts: Sequence[tuple[int, int]], found: Mapping[int, Path]
    ) -> tuple[int, dict[str, Any]] | None:
        """Return step and state of the newest whole copy on this host that is a part of this run.

        Where a later attempt has begun at an earlier step, the run has another course since then.

        Args:
            starts: attempt and first step of each start.
            found: folders of the copies that may be loaded, by step in ascending order.
        """
        for step in sorted(found, reverse=True):
            try:
                opened = open_checkpoint(found[step], step, run=self._run)
                attempt, part = opened.manifest["attempt"], opened.manifest.get("part")
                other_course = any(later > attempt and begun < step for later, begun in starts)
                if part == self._part and not other_course:
                    return step, opened.read()
            except CheckpointError as error:
                if self._writes:
                    logger.warning("%s; the next best copy of the state is used", error.found)
        return None
