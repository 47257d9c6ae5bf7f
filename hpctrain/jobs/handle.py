"""Handle of a job that was submitted from Python: its state, its output and its results.

All data come from Slurm, the job's folder and its run directory. So a later process, such as a
restarted notebook kernel, needs only the id of the job.
"""

import html
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.cluster import proc, slurm
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.jobs import failures, job_curves
from hpctrain.jobs.job_store import JobRecord, Outcome
from hpctrain.jobs.run_progress import progress
from hpctrain.rundir import RunDirectory

__all__ = ["Job"]

_CANCELLED = "cancelled"  # a file in the folder of a local job
_POLL_SECONDS = 0.25
_LONGEST_PAUSE = 10.0
# A file that another host has written may appear late: the attribute cache of NFS.
_SECONDS_FOR_RESULT = 15.0
_LAST_LINES = 20
_UNKNOWN = "unknown"

# In the reason of a failed run: the rank that failed first, and its host.
_FIRST = re.compile(r"rank ([0-9]+)((?: on \S+)?) failed, ")
# Why a job ended in a state, and fixes.
_CAUSES: dict[str, tuple[str, ...]] = {
    "CANCELLED": (
        "it was cancelled",
        "submit it again with JobSpec(run_dir={run!r}) and Session(resume=True)",
    ),
    "TIMEOUT": ("it was still running at its time limit", "a longer time", "a longer signal_time"),
    "OUT_OF_MEMORY": ("it used more memory than it had", "JobSpec(memory=…)"),
    "NODE_FAIL": (
        "a host was lost",
        "submit it again with JobSpec(run_dir={run!r}) and Session(resume=True)",
    ),
}


class Job:
    """Job that `hpctrain.submit` has submitted.

    Args:
        kept: record of the job.
        env: environment for Slurm's commands.
        live: submitit's job, if this process started it.

    Attributes:
        id: Slurm's number; process id of a local job; name of a job in this process.
        via: "slurm", "local" or "debug".
        ranks: number of ranks.
        run_dir: run directory.
        folder: folder with the record, the logs and the results of the job.
    """

    def __init__(self, record: JobRecord, env: Mapping[str, str], submitit_job: Any = None) -> None:
        """Set up the handle without a query to Slurm."""
        self._record, self._env, self._submitit_job = record, env, submitit_job
        self.id, self.via, self.ranks = record.id, record.via, record.ranks
        self.run_dir, self.folder = record.run_dir, record.folder
        self._had_result, self._last = False, (_UNKNOWN, False)
        self._reset_polling()

    @property
    def state(self) -> str:
        """State as Slurm names it: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, etc.

        If Slurm has forgotten the job, its accounting gives the state, else the results of the
        ranks; "unknown" if they are missing. The results, or a cancellation, also give the state
        of a local job that has ended.
        """
        return self._look()[0]

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end of the job, through its requeues; return its state, also at `timeout`.

        Args:
            timeout: seconds to wait; None for no limit. The job continues, also after Ctrl-C.
        """
        self._reset_polling()
        state, ended = self._wait(timeout)
        return state if ended else self.state

    def _reset_polling(self) -> None:
        self._last_query, self._pause = float("-inf"), 2 * _POLL_SECONDS

    def _wait(self, timeout: float | None) -> tuple[str, bool]:
        """Wait, and return the state at the last query, and whether the job has ended.

        The check for a result file is cheap. Slurm is queried when the file appears, and
        otherwise at growing intervals.
        """
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        if self.via == "debug":
            self._submitit_job.results()
        while True:
            has_result = self._record.result(0).exists()
            if has_result and not self._had_result:
                self._pause = _POLL_SECONDS
            self._had_result = has_result
            now = time.monotonic()
            if now >= self._last_query + self._pause:
                self._last = self._look()
                self._last_query, self._pause = now, min(1.5 * self._pause, _LONGEST_PAUSE)
            if self._last[1] or now >= end:
                return self._last
            time.sleep(min(_POLL_SECONDS, end - now))

    def result(self) -> Any:
        """Wait for the job, and return the function's result on rank 0; see `results`."""
        return self.results()[0]

    def results(self) -> list[Any]:
        """Wait for the job, and return the function's results in the order of ranks.

        Raises:
            HpctrainError: a rank failed (the message has the rank and its traceback); or the job
                was cancelled, its time ended, or a result was lost.
        """
        if self.via == "debug":
            return list(self._submitit_job.results())
        state = self.wait()
        outcomes = self._record.outcomes()
        if state == "COMPLETED":
            # Listing the folder also refreshes the cached view of it.
            end = time.monotonic() + _SECONDS_FOR_RESULT
            while None in outcomes and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                os.listdir(self.folder)
                outcomes = self._record.outcomes()
        if all(outcome is not None and outcome[0] == "success" for outcome in outcomes):
            return [outcome[1] for outcome in outcomes if outcome is not None]
        raise self._failure(state, outcomes)

    def logs(self, rank: int = 0) -> str:
        """Return the output of a rank so far; before the ranks run, the output of the job.

        Args:
            rank: number of the rank.
        """
        if not 0 <= rank < self.ranks:
            raise UsageError("HT813", f"logs({rank})", f"a rank from 0 to {self.ranks - 1}")
        return self._record.log(rank)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows that the run has logged so far: `step`, `epoch`, `time`, then values."""
        return RunDirectory(self.run_dir).rows()

    def curves(self) -> Path | None:
        """Plot the metrics of the run until the job has ended.

        In a notebook, one figure is redrawn in place. Elsewhere, `curves.png` in the job's folder
        is rewritten, and a line is printed for each drawing. Ctrl-C ends the plot, not the job.

        Returns:
            The file; None in a notebook.

        Raises:
            UsageError: matplotlib is not installed.
        """
        self._reset_polling()
        title = f"{self._record.title}-{self.id}"
        return job_curves.follow(title, self.metrics, self._wait, self.folder / "curves.png")

    def cancel(self) -> None:
        """End the job, and keep what it has saved. Does nothing for a job in this process.

        Raises:
            HpctrainError: Slurm could not cancel the job; the message has its reason.
        """
        if self.via == "slurm":
            try:
                slurm.cancel([self.id], self._env)
            except slurm.NoAnswerError as error:
                raise HpctrainError("HT816", f"job {self.id} was not cancelled: {error}") from None
        elif self.via == "local" and self._runs():
            (self.folder / _CANCELLED).touch()
            # SIGINT as submitit does. If a shell started this process in the background, its
            # child processes ignore SIGINT.
            ignores_interrupt = proc.ignores(int(self.id), signal.SIGINT)
            os.kill(int(self.id), signal.SIGTERM if ignores_interrupt else signal.SIGINT)

    def _look(self) -> tuple[str, bool]:
        """Return the state, and whether the job has ended."""
        if self.via == "slurm":
            state = slurm.job_state(self.id, self._env)
            if state is not None and state.known:
                return state.name, not state.active
            name = (state and self._accounted()) or self._by_results()
            return name, state is not None or name != _UNKNOWN
        if self.via == "debug":
            done = self._submitit_job.state == "DONE"
            return "COMPLETED" if done else "PENDING", True
        if self.via == "local" and self._runs():
            return "RUNNING", False
        if (self.folder / _CANCELLED).exists():
            return "CANCELLED", True
        name = self._by_results()
        return "FAILED" if name == _UNKNOWN else name, True

    def _accounted(self) -> str:
        """Return the final state of a forgotten job from Slurm's accounting; empty without one."""
        try:
            records = slurm.ended(self.id, self._env)
        except slurm.NoAnswerError:
            return ""
        return records[0].state if records and records[0].state in slurm.ENDED else ""

    def _runs(self) -> bool:
        """Check whether the main process of a local job is alive."""
        if self._submitit_job is not None:
            self._submitit_job.done()  # its parent has to wait for it
        return (
            self._record.process is not None and proc.started(int(self.id)) == self._record.process
        )

    def _by_results(self) -> str:
        outcomes = self._record.outcomes()
        if all(outcome is not None and outcome[0] == "success" for outcome in outcomes):
            return "COMPLETED"
        return (
            "FAILED" if any(outcome and outcome[0] == "error" for outcome in outcomes) else _UNKNOWN
        )

    def _failure(self, state: str, outcomes: list[Outcome]) -> HpctrainError:
        """Return an error with the first failed rank and its traceback, or with the job's end."""
        of_job = f"of job {self.id}" if self.ranks == 1 else f"of {self.ranks} of job {self.id}"
        failed = [
            rank
            for rank, outcome in enumerate(outcomes)
            if outcome is not None and outcome[0] == "error"
        ]
        reason = self._reason()
        named = _FIRST.search(reason)
        first = int(named[1]) if named else None
        # A rank that was killed has no result; the errors of the others follow from that.
        if failed and state not in _CAUSES and (first is None or outcomes[first] is not None):
            if first is None:
                first = min(failed, key=lambda rank: self._record.result(rank).stat().st_mtime_ns)
            host = named[2] if named else ""
            _, trace = outcomes[first] or ("", "")
            text = str(trace).rstrip()
            return HpctrainError("HT822", f"rank {first} {of_job} failed{host}:\n{text}")
        cause, *fixes = _CAUSES.get(state, ("",))
        if not cause:
            rank = outcomes.index(None) if first is None else first
            cause = reason or f"rank {rank} {of_job} has no result"
            tail = "\n".join(self.logs(rank).splitlines()[-_LAST_LINES:])
            cause += f"; the last output of rank {rank}:\n{tail}" if tail else ""
            fixes = [f"hpctrain requeue {self.id}"] if first is not None else []
        message = f"job {self.id} ended as {state}: {cause}"
        run = os.fspath(self.run_dir)
        return HpctrainError("HT823", message, "", *(fix.format(run=run) for fix in fixes))

    def _reason(self) -> str:
        """Return why the run has failed, as `hpctrain run` has recorded it; else empty."""
        run = progress(self.run_dir)
        return run.reason if run is not None and run.status in failures.FAILED else ""

    def __repr__(self) -> str:
        """Return id, current state and run directory."""
        return f"Job(id={self.id!r}, state={self.state!r}, run_dir={os.fspath(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        last = ", ".join(job_curves.last_values(self.metrics()))
        values = {
            "job": self.id,
            "state": self.state,
            "run_dir": os.fspath(self.run_dir),
            "last": last,
        }
        cells = "".join(
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>"
            for name, value in values.items()
        )
        return f"<table>{cells}</table>"
