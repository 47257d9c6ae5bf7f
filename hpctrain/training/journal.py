"""Run journal: lock, logs, rows of metrics and summary in the run directory."""

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain import rundir
from hpctrain.errors import CheckpointError, GivenUpError, HpctrainError, exit_codes
from hpctrain.process.logging import add_log_file, logger, remove_log_file
from hpctrain.process.stderr_capture import StderrCapture
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.effective_time import Recorder, measure
from hpctrain.rundir.lock import Lock
from hpctrain.rundir.used import used_so_far
from hpctrain.training import identity
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.metrics import Metrics, table, trim
from hpctrain.training.preemption import Stopped

__all__ = ["RunJournal", "code_of"]


class RunJournal:
    """Journal of a run, from the moment at which rank 0 has chosen and locked the directory.

    Args:
        context: context of the training.
        name: name of the run; None for the only run of a script.
        script: name of the script.

    Attributes:
        directory: run directory, the same on all ranks.
        finished: whether the run was already finished; then the directory is not locked.
        key: unique key of this start, the same on all ranks.
        lock: lock on the directory at rank 0; None on the other ranks.
        metrics: rows of metrics; None before `begin`.
        recorder: recorder of the effective training time at rank 0; None before `begin`, and on the
            other ranks.

    Raises:
        UsageError: rank 0 cannot use the directory, or another start uses it.
    """

    def __init__(self, context: Context, name: str | None, script: str) -> None:
        self._context = context
        self.lock: Lock | None = None
        self.metrics: Metrics | None = None
        self.recorder: Recorder | None = None
        path, self.finished, self.key = on_rank_zero(
            context.backend, lambda: self._claim(name, script)
        )
        self.directory = RunDirectory(path)
        log = self.directory.log(context.world.rank)
        self._log: logging.Handler = add_log_file(log)
        self._stderr = StderrCapture(log) if context.backend.captures_stderr else None

    def _claim(self, name: str | None, script: str) -> tuple[str, bool, str]:
        directory, self.lock = identity.claim(name, script, self._context, os.environ)
        if self.lock is None:
            identity.note_end(directory)
        return str(directory.path.absolute()), self.lock is None, secrets.token_hex(8)

    def begin(self, step: int, rows: int) -> Metrics:
        """Record this start, and return the rows of metrics; called by all ranks.

        Args:
            step: step at which this start continues.
            rows: number of rows of metrics to keep.

        Raises:
            GivenUpError: the job was restarted too often at this step.
            CheckpointError: the directory cannot be written.
        """
        context = self._context

        def note() -> None:
            identity.refuse_fruitless(self.directory, context.allocation, step)
            try:
                identity.note_start(self.directory, context, step)
                self.directory.summary.unlink(missing_ok=True)
                trim(self.directory, rows)
                again = identity.is_again(os.environ)
                self.recorder = Recorder(self.directory, os.environ, context.opened, again, step)
            except OSError as error:
                raise rundir.no_room(
                    self.directory.path, "the files of this launch", error
                ) or CheckpointError(
                    "HT617.cannot-write", error=error, directory=self.directory
                ) from None

        on_rank_zero(context.backend, note)
        self.metrics = Metrics(context.backend, self.directory, rows, context.events)
        return self.metrics

    def close(
        self, error: BaseException | None, date: float, facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Release all but the logs; rank 0 writes the summary if it still has the directory.

        Args:
            error: error that ended the run, if any.
            date: time of the end, in Unix seconds.
            facts: returns more values for summary.json.
        """
        if self.metrics is not None:
            self.metrics.close()
        if self.lock is None:
            return
        try:
            with self.lock.commit():
                self._sum_up(error, date, facts)
        except OSError as failed:
            told = isinstance(error, CheckpointError)  # that the disk is full
            if not (told and rundir.no_room(self.directory.path, "", failed)):
                logger.error("%s could not be written: %s", self.directory.summary, failed)
        except CheckpointError as replaced:
            logger.error("%s", replaced)
        finally:
            if self.recorder is not None:
                self.recorder.close()
            self.lock.release()

    def drop_logs(self) -> None:
        """End the logs of this run."""
        if self._stderr is not None:
            self._stderr.close()
            # Release this reference to the original standard error; a handler may keep its own.
            self._stderr = None
        remove_log_file(self._log)

    def _sum_up(
        self, error: BaseException | None, date: float, facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Write summary.json, and print a short table if the run is done."""
        context, code = self._context, code_of(error)
        if isinstance(error, GivenUpError):
            self.directory.record_end(exit_codes.GIVEN_UP, error.found)
        if self.metrics is None or self.recorder is None:
            return  # it ended before training
        self.recorder.leave(code, date)
        effective = measure(self.directory)
        summary = {
            "status": exit_codes.STATUS[code],
            "metrics": self.metrics.last,
            "world_size": context.world.world_size,
            "backend": context.backend.name,
            "precision": context.precision.name,
            **facts(),
            **({"reason": error.found} if isinstance(error, HpctrainError) else {}),
            **(effective.as_json() if effective else {}),
        }
        rundir.replace(self.directory.summary, json.dumps(summary, indent=1) + "\n")
        if code == exit_codes.STOPPED:
            logger.info("%s", effective)
        if code == exit_codes.DONE:
            identity.note_end(self.directory)
            used = used_so_far(self.directory, effective, True) if context.allocation else ()
            text = table(summary, context.backend.transport, self.directory, effective, used)
            sys.stdout.write(text)
            sys.stdout.flush()


def code_of(error: BaseException | None) -> int:
    """Return the exit code of `exit_codes` for the error that ended a run, or for no error."""
    if isinstance(error, Stopped):
        return exit_codes.STOPPED
    if isinstance(error, GivenUpError):
        return exit_codes.GIVEN_UP
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return exit_codes.DONE
    return exit_codes.FAILED
