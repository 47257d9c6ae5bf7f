"""Saving hardly stops training: a thread writes a copy of the state while it goes on."""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.folder import Folder
from hpctrain.checkpoint.snapshot import Buffers, Snapshot, freeze
from hpctrain.errors import CheckpointError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = ["Writer", "save"]

# The thread takes what the training leaves of a processor; 19 is the least, see setpriority(2).
_NICE = 10


def save(
    directory: RunDirectory, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]
) -> Path:
    """Commit a checkpoint at once, then remove all but the newest three.

    Args:
        directory: of the run.
        step: optimizer steps done.
        state: part by part what `torch.save` takes; each part is a file.
        facts: more for the manifest; JSON values.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: it could not be written; those before it are untouched.
        UsageError: a state holds what cannot be loaded again.
    """
    return Folder(directory).save(step, freeze(state), _as_json(facts))


@dataclass
class _Job:
    """A save: when it began, and what it writes."""

    step: int
    snapshot: Snapshot
    facts: dict[str, Any]
    begin: float


class Writer:
    """Writes the checkpoints of a run, one at a time; rank 0 alone has one.

    Args:
        directory: of the run.
        keep: how many of the newest checkpoints stay.
        best: the name of a metric in `facts["metrics"]`: the checkpoint with the best value stays
            as well. Higher is better, lower where the name ends in "loss".
        commit: entered around the renames and removals. It raises CheckpointError where this start
            has been replaced by another one; then nothing is renamed or removed.
        clock: seconds, for how long a save takes; a test moves one of its own.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        keep: int = 3,
        best: str | None = None,
        commit: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = Folder(directory, keep, best, commit)
        self._clock = clock
        self._buffers = Buffers()
        self._structures: dict[str, bytes] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._error: CheckpointError | None = None  # of the newest finished save
        self._untold: CheckpointError | None = None  # of any save, until `failure` or `wait`
        self._seconds: float | None = None
        self._committed: int | None = None

    def save(self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Copy the state and let it be written; waits first for a save that is under way.

        Nothing of the caller's tensors is read after it returned. Where there is no memory for the
        copy it returns when all is written. What goes wrong there is told by `failure` and `wait`.

        Args:
            step: optimizer steps done.
            state: part by part what `torch.save` takes; each part is a file.
            facts: more for the manifest; JSON values.

        Raises:
            UsageError: the state holds what cannot be loaded again; nothing is written.
        """
        self._idle.wait()
        begin = self._clock()
        snapshot = freeze(state, self._structures)
        copied = self._buffers.copy(snapshot)
        job = _Job(step, snapshot, _as_json(facts), begin)
        if copied and self._serving():
            self._idle.clear()
            self._jobs.put(job)
        else:
            self._run(job)

    def wait(self) -> None:
        """Until everything is written.

        Raises:
            CheckpointError: the last save failed.
        """
        self._idle.wait()
        if self._error is not None:
            self._untold = None
            raise self._error

    def failure(self) -> CheckpointError | None:
        """What went wrong in the newest finished save, told once; waits for nothing."""
        untold, self._untold = self._untold, None
        return untold

    @property
    def seconds(self) -> float | None:
        """The longest that a save took from its copy to its commit; None before the first."""
        return self._seconds

    @property
    def committed(self) -> int | None:
        """The step of the newest checkpoint that this writer has committed; None before it."""
        return self._committed

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._idle.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _serving(self) -> bool:
        """Whether the thread is there; a limit on processes may forbid it."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="checkpoint writer", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("training waits while a checkpoint is written: %s", error)
                return False
            self._thread = thread
        return True

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # where a container forbids it
            # Linux has a priority for each thread.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job  # the copies are the buffers' again
            self._idle.set()

    def _run(self, job: _Job) -> None:
        """Write and commit; an error is said, and kept for `failure` and `wait`."""
        error = None
        try:
            self._folder.save(job.step, job.snapshot, job.facts)
            self._committed = job.step
        except CheckpointError as failed:
            error = failed
        except Exception as unknown:  # nothing may end the thread, whom save() waits for
            error = CheckpointError(
                f"the checkpoint of step {job.step} could not be written: "
                f"{type(unknown).__name__}: {unknown}"
            )
        if error is not None:
            logger.error("%s", error)
        taken = self._clock() - job.begin
        self._seconds = max(taken, self._seconds or 0.0)
        self._error, self._untold = error, error or self._untold


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as a manifest gives them back: a copy, with names that are strings."""
    return dict(json.loads(json.dumps(dict(facts))))
