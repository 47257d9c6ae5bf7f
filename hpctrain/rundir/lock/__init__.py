"""Lock of a run directory: one start owns it, and only the owner commits checkpoints.

`.lock` in the run directory is a JSON file that names the owner (`record`). Rank 0 of the owner
updates the file's time every 20 seconds (heartbeat). Another start that finds the file checks
whether the owner is alive, with the most reliable source first (`liveness`):

1. the same job, requeued: the newer start takes the directory over, the older start is refused;
2. another job: Slurm reports whether it is alive;
3. a process of this host: the kernel reports whether it is alive;
4. a step of the same job on another host: Slurm reports whether it has ended;
5. without these sources: the owner is dead after five minutes without heartbeat.

At each commit of a checkpoint the start checks that it still owns the directory. A start that Slurm
has replaced may still run on a disconnected host. It is fenced off and cannot commit. A random
token identifies the owner, so that clocks and reused numbers do not matter.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Self

from hpctrain.cluster.job import Allocation
from hpctrain.errors import CheckpointError, ReplacedError, UsageError
from hpctrain.rundir import RunDirectory, no_room
from hpctrain.rundir.lock.liveness import refuse_if_alive
from hpctrain.rundir.lock.record import CAREFULLY, Owner, look, myself, put, turn

__all__ = ["Lock"]

_HEARTBEAT = 20.0
# Attempts to take a free directory while other starts are faster.
_ATTEMPTS = 10


class Lock:
    """Ownership of a run directory by one start; created by `take`."""

    def __init__(self, directory: RunDirectory, owner: Owner, clock: Callable[[], float]) -> None:
        self._path = directory.lock
        self._clock = clock
        self._owner = owner
        self._end = threading.Event()
        # The heartbeat updates this open file, and not a later file with the same name.
        self._file = os.open(self._path, os.O_RDONLY | CAREFULLY)
        self._thread = threading.Thread(target=self._heartbeat, name="hpctrain lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        directory: RunDirectory,
        job: Allocation | None,
        env: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Lock a directory on rank 0, before any change in it; create it if it is missing.

        Args:
            directory: run directory.
            job: allocation of the scheduler; None without one.
            env: environment for the commands that query Slurm.
            clock: function that returns seconds, for time-outs; tests replace it.

        Raises:
            UsageError: another start owns the directory and is, or may be, alive; several starts
                compete for it; or it cannot be written.
            CheckpointError: its file system takes no more data.
        """
        path = directory.lock
        this_start = myself(job, env)
        text = json.dumps(asdict(this_start)) + "\n"
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                found = look(path)
                if found is not None:
                    refuse_if_alive(found, this_start, path, env)
                with turn(path, clock):
                    current = look(path)
                    unchanged = (current and current.mark) == (found and found.mark)
                    if unchanged and put(path, current, text, this_start):
                        return cls(directory, this_start, clock)
        except OSError as error:
            raise no_room(directory.path, "its lock", error) or UsageError(
                "HT702.cannot-lock", directory=directory, error=error
            ) from None
        raise UsageError("HT703.simultaneous-launches", directory=directory)

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Hold the directory during a commit, so that no other start takes it over meanwhile.

        Raises:
            ReplacedError: the directory belongs to another start; nothing may be committed.
            CheckpointError: the lock file cannot be read.
        """
        with turn(self._path, self._clock):
            self._refuse_fenced()
            yield

    def release(self) -> None:
        """Remove the lock file if this start still owns the directory. Never raises."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(timeout=1.0)  # the heartbeat may hang with the file system
        with contextlib.suppress(OSError), turn(self._path, self._clock):
            os.close(self._file)
            found = look(self._path)
            if found and found.owner and found.owner.token == self._owner.token:
                self._path.unlink()

    def _refuse_fenced(self) -> None:
        try:
            found = look(self._path)
        except OSError as error:
            raise CheckpointError("HT702.owner-unreadable", error=error, path=self._path) from None
        if found and found.owner and found.owner.token == self._owner.token:
            return
        if found is None:
            key = "HT704.lock-removed"
        elif found.owner is None:
            key = "HT704.foreign-lock"
        else:
            key = "HT704.other-owner"
        raise ReplacedError(key, path=self._path, lock=found, owner=self._owner)

    def _heartbeat(self) -> None:
        while not self._end.wait(_HEARTBEAT):
            with contextlib.suppress(OSError):  # the file system may be unavailable for a while
                os.utime(self._file)
