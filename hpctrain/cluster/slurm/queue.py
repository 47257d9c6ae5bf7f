"""The jobs that the controller remembers: those that wait or run, and those that just ended."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hpctrain.cluster.slurm.command import NoAnswerError, ask
from hpctrain.cluster.slurm.states import ENDED

__all__ = ["Job", "jobs"]

# By the names of --Format of squeue(1), in the order of the fields of Job.
_COLUMNS = (
    *("JobArrayID", "JobID", "ArrayJobID", "ArrayTaskID", "UserName", "UserID", "Name", "State"),
    *("Reason", "RestartCnt", "exit_code", "TimeUsed", "TimeLeft", "StartTime", "NumNodes"),
    *("NodeList", "WorkDir", "Partition"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A job, a task of an array, or the tasks of an array that still wait.

    Attributes:
        label: as Slurm's tools show it: 70, 70_3, or 70_[4-9%2] for tasks that wait.
        number: its own number, which for a task is not that of the array.
        array: the number that sbatch gave; the own one where there is no array.
        task: index in the array, or those that wait; "N/A" without an array.
        user, uid: whose it is.
        name: any text at all, line ends and control characters included.
        word: its state, such as RUNNING.
        reason: why it waits or how it ended, in Slurm's words; "None" where there is none.
        restarts: how often it was requeued.
        code: exit code, and 128 and the signal that ended it; 0 while it has none, and of a job
            that never started.
        used, left: times as Slurm writes them.
        start: when it began or is expected to, YYYY-MM-DDTHH:MM:SS; "N/A" where unknown.
        nodes: how many.
        hosts: as a Slurm host list; empty while it waits.
        folder: where it was submitted.
        partition: where it runs.
    """

    label: str
    number: str
    array: str
    task: str
    user: str
    uid: str
    name: str
    word: str
    reason: str
    restarts: int
    code: int
    used: str
    left: str
    start: str
    nodes: str
    hosts: str
    folder: str
    partition: str

    @property
    def lives(self) -> bool:
        """Whether it has processes, or waits to have some."""
        return self.word not in ENDED

    @property
    def refused(self) -> bool:
        """Whether it failed before it had any host, as a job that sbatch gave no number for."""
        return self.word == "FAILED" and not self.hosts


def jobs(env: Mapping[str, str], labels: Sequence[str] = (), uid: int | None = None) -> list[Job]:
    """The jobs with some numbers, or of one user, in one question; the oldest first.

    Args:
        env: for the command.
        labels: `JOBID`, or `ARRAYJOBID_TASK`; jobs that Slurm has forgotten are left out.
        uid: of the user.

    Raises:
        NoAnswerError: Slurm is absent, or did not answer.
    """
    # Names may hold anything but what was made up after they were given.
    cut, end = (f"<{os.urandom(8).hex()}>" for _ in range(2))
    wanted = ",".join(f"{column}:0{cut}" for column in _COLUMNS[:-1]) + f",{_COLUMNS[-1]}:0{end}"
    argv = ["squeue", "--noheader", "--states=all", f"--Format={wanted}"]
    argv += [f"--job={','.join(labels)}"] if labels else []
    argv += [f"--user={uid}"] if uid is not None else []
    try:
        said = ask(argv, env)
    except NoAnswerError as error:
        if labels and "Invalid job id" in str(error):
            return []
        raise
    rows = [row.removeprefix("\n").split(cut) for row in said.split(end)[:-1]]
    if any(len(row) != len(_COLUMNS) for row in rows) or (said.strip() and not rows):
        raise NoAnswerError(f"squeue: no answer that can be read: {said[:200]!r}")
    try:
        return sorted((_job(row) for row in rows), key=_order)
    except ValueError as error:
        raise NoAnswerError(f"squeue: no answer that can be read: {error}") from None


def _job(row: Sequence[str]) -> Job:
    restarts, status = int(row[9] or 0), int(row[10] or 0)
    code = status >> 8 & 0xFF or (128 + (status & 0x7F) if status & 0x7F else 0)
    texts = [*row[:9], *row[11:]]
    names = [one.name for one in fields(Job) if one.name not in ("restarts", "code")]
    job = Job(restarts=restarts, code=code, **dict(zip(names, texts, strict=True)))
    # Slurm gives it 1, which would be a signal.
    return replace(job, code=0) if job.refused else job


def _order(job: Job) -> tuple[int, bool, int]:
    """By number; of an array the tasks by index, those that wait last."""
    return int(job.array), not job.task.isdigit(), int(job.task) if job.task.isdigit() else 0
