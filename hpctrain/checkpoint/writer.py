"""Writer of checkpoints: a thread writes a copy of the state while training continues."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.backends.extent import Extent
from hpctrain.checkpoint.buffers import Buffers
from hpctrain.checkpoint.data_files import Team, note_alive, plan
from hpctrain.checkpoint.folder import Folder
from hpctrain.checkpoint.snapshot import Snapshot, freeze
from hpctrain.errors import CheckpointError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = ["Save", "Writer"]

# The thread uses processor time that training leaves free; 19 is the lowest priority, see
# setpriority(2).
_NICE = 10
# A rank that ends while it writes tells rank 0 so often that it is alive.
_SECONDS_OF_A_SIGN = 0.5


@dataclass
class Save:
    """One save: its start time, what it writes, and its temporary folder."""

    step: int
    snapshot: Snapshot
    facts: dict[str, Any]
    begin: float
    folder: Path


class Writer:
    """Checkpoint writer of a run, for one checkpoint at a time.

    Each rank of a team writes a part of it, and rank 0 commits it.

    Args:
        directory: run directory.
        keep: number of newest checkpoints to keep.
        best: name of a metric in `facts["metrics"]`; the checkpoint with its best value is kept
            too. Higher is better, lower if the name ends in "loss".
        commit: context manager around the renames and removals. It raises CheckpointError if
            another start has replaced this one; then nothing is renamed or removed.
        team: ranks that write together (default: this process alone).
        clock: function that returns seconds, to measure a save; tests replace it.

    Attributes:
        seconds: longest time of a save from copy to commit, in seconds; None before the first save.
        committed: step of the newest checkpoint that this writer committed, or whose part it wrote
            on another rank than 0; None before the first.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        keep: int = 3,
        best: str | None = None,
        commit: Callable[[], AbstractContextManager[None]] = nullcontext,
        team: Team | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._team = team or Team()
        self._folder = Folder(directory, keep, best, commit, self._team)
        self._clock = clock
        self._buffers = Buffers()
        self._structures: dict[str, bytes] = {}
        self._thread: threading.Thread | None = None  # writes the newest save
        self._writing: Path | None = None  # folder of the newest save
        self._error: CheckpointError | None = None  # error of the newest finished save
        self._unreported: CheckpointError | None = None  # for `failure` and `wait`
        self._failures = 0  # in a row, of one kind
        self._kind = "", ""
        self.seconds: float | None = None
        self.committed: int | None = None

    def save(self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Prepare a save, and start it.

        Args:
            step, state, facts: as for `prepare`.

        Raises:
            UsageError: as for `prepare`.
        """
        self.start(self.prepare(step, state, facts))

    def prepare(
        self,
        step: int,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        extents: Mapping[int, Extent] | None = None,
    ) -> Save:
        """Wait for the previous save, and copy the plain values of a state.

        Args:
            step: optimizer steps done.
            state: values for `torch.save` by name of the part; each part becomes a file.
            facts: additional entries for the manifest; JSON values.
            extents: what this rank holds of some tensors; see `freeze`.

        Raises:
            UsageError: the state contains values that cannot be loaded again; nothing is written.
        """
        self._join()
        begin = self._clock()
        folder = self._folder.temporary(step)  # first: all ranks count their saves
        snapshot = freeze(state, self._structures, extents)
        plan(snapshot, self._team)
        # As a manifest returns them, with string keys.
        copy = dict(json.loads(json.dumps(dict(facts))))
        return Save(step, snapshot, copy, begin, folder)

    def start(self, save: Save) -> None:
        """Copy the tensors of a state, and write the copy in the background.

        The caller's tensors are not read after the return. If there is no memory for the copy,
        this method returns after everything is written. `failure` and `wait` report errors of the
        write.

        Args:
            save: result of `prepare`.
        """
        self._writing = save.folder
        self._team.others = "writing"
        if self._buffers.copy(save.snapshot):
            thread = threading.Thread(
                target=self._run_aside, args=(save,), name="checkpoint writer", daemon=True
            )
            try:
                thread.start()
                self._thread = thread
                return
            except RuntimeError as error:  # from a limit on processes
                logger.warning("training waits while a checkpoint is written: %s", error)
        self._team.others = "waited for by the training"
        self._run(save)

    def settle(self) -> None:
        """Wait until this rank has written its part; rank 0 does not wait for the others."""
        if self._team.rank:
            self._join()

    def all_written(self) -> None:
        """Tell this writer, at rank 0, that all ranks have returned from `settle`."""
        self._team.others = "ready"

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: the last save failed.
        """
        self._join()
        if self._error is not None:
            self._unreported = None
            raise self._error

    def failure(self) -> CheckpointError | None:
        """Return the error of the newest failed save, only once and without waiting."""
        error, self._unreported = self._unreported, None
        return error

    def close(self) -> None:
        """Wait until everything is written.

        Ranks that are gone are not waited for: their checkpoint is not committed.
        """
        if self._team.others != "ready":
            self._team.others = "leaving"
        while self._thread is not None:
            self._thread.join(_SECONDS_OF_A_SIGN)
            if not self._thread.is_alive():
                self._thread = None
            elif self._team.rank and self._writing is not None:
                note_alive(self._writing, self._team.rank)
        if self._team.name and self._team.rank == 0:
            self._folder.clear()

    def _join(self) -> None:
        """Wait until the newest save is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run_aside(self, job: Save) -> None:
        with contextlib.suppress(OSError):  # a container may forbid it
            # On Linux each thread has its own priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._run(job)

    def _run(self, job: Save) -> None:
        """Write and commit; log an error and keep it for `failure` and `wait`."""
        error = None
        try:
            if self._team.rank == 0:
                self._folder.save(job.step, job.snapshot, job.facts, job.folder)
            elif self._team.rank in job.snapshot.writers:
                self._folder.save_part(job.step, job.snapshot, job.folder)
            self.committed = job.step
            self._note_success(job.step)
        except CheckpointError as failed:
            error = failed
        except Exception as unknown:  # of any kind: `failure` reports it
            error = CheckpointError("HT705.unexpected-error", step=job.step, error=unknown)
        if error is not None:
            self._note_failure(job.step, error)
        seconds = self._clock() - job.begin
        self.seconds = max(seconds, self.seconds or 0.0)
        self._error, self._unreported = error, error or self._unreported

    def _note_failure(self, step: int, error: CheckpointError) -> None:
        """Log an error of a new kind, and later how often it has come: 2, 4, 8, … times."""
        kind = error.code, error.expected
        self._failures = self._failures + 1 if kind == self._kind else 1
        self._kind = kind
        extra = {"screen": self._team.rank == 0}  # which tells the errors of the other ranks, too
        if self._failures == 1:
            logger.error("%s", error, extra=extra)
        elif not self._failures & self._failures - 1:
            text = "%d checkpoints in a row could not be written, the last one of step %d"
            logger.error(text, self._failures, step, extra=extra)

    def _note_success(self, step: int) -> None:
        if self._failures and self._team.rank == 0:
            text = "the checkpoint of step %d is written, after %d that could not be"
            logger.info(text, step, self._failures)
        self._failures, self._kind = 0, ("", "")
