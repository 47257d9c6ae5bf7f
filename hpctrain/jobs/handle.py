"""Handle of a job that was submitted from Python: its state, its output and its results.

What it shows comes from Slurm, the job's folder and its run directory. So a later process, such as
a restarted notebook kernel, needs only the id of the job. submitit's own Job cannot replace it: its
states need accounting, and it takes results of a stopped or crashed start for those of the job.
"""

import os
import re
import time
from pathlib import Path
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.jobs import job_facts, job_watching
from hpctrain.jobs.job_store import JobRecord, Outcome
from hpctrain.rundir import RunDirectory

__all__ = ["Job"]

_POLL_SECONDS = 0.5
_LONGEST_PAUSE = 10.0
# A file that another host has written may appear late: the attribute cache of NFS.
_SECONDS_FOR_RESULT = 15.0
_LAST_LINES = 20
_UNKNOWN = "unknown"

# In the reason of a failed run: the rank that failed first, and its node.
_FIRST = re.compile(r"rank ([0-9]+)(?: on (\S+))? failed, ")
# Messages by the state in which a job ended.
_BY_STATE = {
    "CANCELLED": "HT823.cancelled",
    "TIMEOUT": "HT823.time-limit",
    "OUT_OF_MEMORY": "HT823.out-of-memory",
    "NODE_FAIL": "HT823.node-failed",
}


class Job:
    """Job that `hpctrain.submit` has submitted.

    Args:
        record: record of the job.

    Attributes:
        id: Slurm's number.
        ranks: number of ranks.
        run_dir: run directory.
        folder: folder with the logs and the results of the job.
    """

    id: str
    ranks: int
    run_dir: Path
    folder: Path

    def __init__(self, record: JobRecord) -> None:
        """Set up the handle without a query to Slurm."""
        self._record = record
        self.id, self.ranks = record.id, record.ranks
        self.run_dir, self.folder = record.run_dir, record.folder

    @property
    def state(self) -> str:
        """State as Slurm names it: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, etc.

        If Slurm has forgotten the job, its accounting gives the state, else the results of the
        ranks; "unknown" if they are missing.
        """
        return self._look()[0]

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end of the job, through its requeues; return its state, also at `timeout`.

        Args:
            timeout: seconds to wait; None for no limit. The job continues, also after Ctrl-C.
        """
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        pause = _POLL_SECONDS
        while True:
            now = time.monotonic()
            state, ended = self._look()
            if ended or now >= end:
                return state
            time.sleep(min(pause, end - now))
            pause = min(1.25 * pause, _LONGEST_PAUSE)

    def result(self) -> Any:
        """Wait for the job, and return the function's result on rank 0; see `results`."""
        return self.results()[0]

    def results(self) -> list[Any]:
        """Wait for the job, and return the function's results in the order of ranks.

        Raises:
            HpctrainError: a rank failed (the message has the rank and its traceback); or the job
                was cancelled, its time ended, or a result was lost.
        """
        state = self.wait()
        outcomes = self._record.outcomes()
        end = time.monotonic() + _SECONDS_FOR_RESULT * (state == "COMPLETED")
        while None in outcomes and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            os.listdir(self.folder)  # also refreshes the cached view of it
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
            raise UsageError("HT813.no-such-rank", rank=rank, last=self.ranks - 1)
        return self._record.log(rank)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows that the run has logged so far: `step`, `epoch`, `time`, then values."""
        return RunDirectory(self.run_dir).current().rows()

    def curves(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return the metrics that the run has logged so far: by name, the steps and the values.

        `plt.plot(*job.curves()["loss"])` draws one. Empty before the first row.
        """
        run = RunDirectory(self.run_dir).current()
        return job_watching.curves(run.path) if run.identity.exists() else {}

    def cancel(self) -> None:
        """End the job, and keep what it has saved.

        Raises:
            HpctrainError: Slurm could not cancel the job; the message has its reason.
        """
        try:
            slurm.cancel([self.id], os.environ)
        except slurm.NoAnswerError as error:
            raise HpctrainError("HT816.not-cancelled", label=self.id, error=error) from None

    def _look(self) -> tuple[str, bool]:
        """Return the state, and whether the job has ended."""
        state = slurm.job_state(self.id, os.environ)
        if state is not None and state.known:
            return state.name, not state.active
        records = slurm.ended(self.id, os.environ) if state else []
        accounted = [one.state for one in records[:1] if one.state in slurm.ENDED]
        name = accounted[0] if accounted else self._by_results()
        return name, state is not None or name != _UNKNOWN

    def _by_results(self) -> str:
        kinds = {outcome[0] if outcome else "" for outcome in self._record.outcomes()}
        if kinds == {"success"}:
            return "COMPLETED"
        return "FAILED" if "error" in kinds else _UNKNOWN

    def _failure(self, state: str, outcomes: list[Outcome]) -> HpctrainError:
        """Return an error with the first failed rank and its traceback, or with the job's end."""
        if state in _BY_STATE:
            return HpctrainError(_BY_STATE[state], job=self)
        failed = [
            rank for rank, one in enumerate(outcomes) if one is not None and one[0] == "error"
        ]
        reason = self._reason()
        named = _FIRST.search(reason)
        first = int(named[1]) if named else None
        # A rank that was killed has no result; the errors of the others follow from that.
        if failed and (first is None or outcomes[first] is not None):
            if first is None:
                first = min(failed, key=lambda rank: self._record.result(rank).stat().st_mtime_ns)
            _, trace = outcomes[first] or ("", "")
            text, node = str(trace).rstrip(), named and named[2]
            key = "HT822.rank-failed-on-node" if node else "HT822.rank-failed"
            return HpctrainError(key, rank=first, job=self, node=node, traceback=text)
        key = "HT823.run-failed" if first is None else "HT823.rank-failed"
        rank = outcomes.index(None) if first is None else first
        reason = reason or f"rank {rank} of {self.ranks} has no result"
        output = "\n".join(self.logs(rank).splitlines()[-_LAST_LINES:]) or "(none)"
        return HpctrainError(key, job=self, state=state, reason=reason, rank=rank, output=output)

    def _reason(self) -> str:
        """Return why the run has failed, as `hpctrain run` has recorded it; else empty."""
        run = job_facts.progress(self.run_dir)
        return run.reason if run is not None and run.status in job_facts.FAILED else ""

    def __repr__(self) -> str:
        """Return id, current state and run directory."""
        return f"Job(id={self.id!r}, state={self.state!r}, run_dir={os.fspath(self.run_dir)!r})"
