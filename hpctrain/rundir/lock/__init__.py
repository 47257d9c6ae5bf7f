"""One run, one directory: who has it, whether they live, and that only they commit.

`.lock` in the run directory is a JSON file that says which start has it (`record`). Rank 0 of that
start renews its time every 20 seconds. A start that finds another one's decides by what it can
know, best first (`living`):

1. the same job, requeued since: its own, taken over; the start of before the requeue is refused;
2. another job: Slurm says whether it lives;
3. a process of this host: it lives, or it does not;
4. a step of the same job on another host: Slurm says whether it has ended;
5. where nobody can be asked: who has been silent for five minutes is dead.

Around each commit of a checkpoint the start looks whether the directory is still its own. A start
that Slurm has given up and replaced may still run, on a host that was cut off: it is fenced off,
and may not commit any more. The file says which start by a random token, so no clock and no number
that is given twice decides that.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Self

from hpctrain.cluster.job import Allocation
from hpctrain.errors import CheckpointError, ReplacedError, UsageError
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.lock.liveness import refuse_living
from hpctrain.rundir.lock.mutex import turn
from hpctrain.rundir.lock.record import CAREFULLY, Owner, look, myself, put

__all__ = ["Lock"]

_HEARTBEAT = 20.0
# Times that another start may be faster at taking a directory that was free.
_ATTEMPTS = 10


class Lock:
    """The claim of one start to a run directory; made by `take`."""

    def __init__(self, directory: RunDirectory, owner: Owner, clock: Callable[[], float]) -> None:
        self._path = _path(directory)
        self._clock = clock
        self._owner = owner
        self._end = threading.Event()
        # The file that is open here, and no other that may follow it under this name.
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
        """Claim a directory, which is made where it is missing. By rank 0, before it is changed.

        Args:
            directory: of the run.
            job: the scheduler's.
            env: for the commands that ask Slurm.
            clock: seconds, for time-outs; a test moves one of its own.

        Raises:
            UsageError: another start has it and lives, or may live; or it cannot be written.
        """
        path = _path(directory)
        mine = myself(job, env)
        text = json.dumps(asdict(mine)) + "\n"
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                seen = look(path)
                if seen is not None:
                    refuse_living(seen, mine, path, env)
                with turn(path, clock):
                    now = look(path)
                    if (now and now.mark) == (seen and seen.mark) and put(path, now, text, mine):
                        return cls(directory, mine, clock)
        except OSError as error:
            raise UsageError(
                f"the run directory {directory.path} cannot be locked: {error}",
                "a place that can be written",
                "--run DIR",
            ) from None
        raise UsageError(
            f"several starts want {directory.path} at once, and this one was not the first",
            "one start at a time in a run directory",
            "--run DIR for another directory",
        )

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Hold the directory for the moment of a commit: nobody takes it over meanwhile.

        Raises:
            ReplacedError: it belongs to another start by now; nothing may be committed.
            CheckpointError: nobody can say whose it is.
        """
        with turn(self._path, self._clock):
            self._refuse_fenced()
            yield

    def release(self) -> None:
        """Give the directory back, where it is still this start's. Never raises."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(timeout=1.0)  # renewing may hang with a file system
        with contextlib.suppress(OSError), turn(self._path, self._clock):
            os.close(self._file)
            seen = look(self._path)
            if seen and seen.owner and seen.owner.token == self._owner.token:
                self._path.unlink()

    def _refuse_fenced(self) -> None:
        try:
            seen = look(self._path)
        except OSError as error:
            raise CheckpointError(
                f"whose the run directory is cannot be read: {error}",
                f"{self._path}, as this start wrote it",
                f"ls -l {self._path}",
            ) from None
        if seen and seen.owner and seen.owner.token == self._owner.token:
            return
        if seen is None:
            found = f"fenced off: {self._path} is gone, as others had the directory or removed it"
        else:
            found = f"fenced off: {self._path.parent} is now that of {seen.owner or seen.foreign}"
        raise ReplacedError(
            f"{found}; nothing more of this start ({self._owner}) is kept",
            "that nobody else takes the directory while this start runs",
            "leave it to the newer start, or start again with --resume when that has ended",
        )

    def _heartbeat(self) -> None:
        while not self._end.wait(_HEARTBEAT):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                os.utime(self._file)


def _path(directory: RunDirectory) -> Path:
    return directory.path / ".lock"
