"""Jobs in the controller's list: waiting, running and recently ended ones."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.slurm.asking import ask, count, exit_code
from hpctrain.cluster.slurm.job_state import ENDED

# Names for --Format of squeue(1), in the order of the fields of QueuedJob.
_COLUMNS = (
    *("JobArrayID", "JobID", "ArrayJobID", "ArrayTaskID", "UserName", "UserID", "Name", "State"),
    *("Reason", "RestartCnt", "exit_code", "TimeUsed", "TimeLeft", "StartTime", "NumNodes"),
    *("NodeList", "WorkDir", "STDOUT", "Partition", "PreemptTime", "SubmitTime", "TimeLimit"),
    *("Dependency", "PriorityLong", "Account", "QOS"),
)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job, a task of an array, or the waiting tasks of an array.

    Attributes:
        label: label in the format of Slurm's tools: 70, 70_3, or 70_[4-9%2] for waiting tasks.
        number: id of the job; for a task of an array it differs from the id of the array.
        array: id that sbatch printed; the same as `number` without an array.
        task: index in the array, or indices of the waiting tasks; "N/A" without an array.
        user, uid: name and id of the user.
        name: name of the job; any text, possibly with line ends and control characters.
        state: state of the job, such as RUNNING.
        reason: Slurm's reason for the waiting or the end of the job; "None" if there is none.
        restarts: number of times that the job was requeued.
        code: exit code, or 128 plus the signal that ended the job; 0 before the end, and for a
            job that never started.
        used, left: elapsed and remaining time in Slurm's format.
        start: actual or expected start, YYYY-MM-DDTHH:MM:SS; "N/A" if unknown.
        nodes: number of hosts; 0 if unknown.
        hosts: Slurm host list; empty while the job waits.
        folder: working directory of the job.
        log: path of the log, with the patterns of its name, such as %j.
        partition: partition of the job.
        preemption: time at which it was preempted and began its grace time; "N/A" if it was not.
        submitted: time of its submission, or of its last requeue, YYYY-MM-DDTHH:MM:SS.
        limit: time limit in Slurm's format.
        dependency: jobs that it waits for, such as afterok:71(unfulfilled); empty if there are
            none.
        priority: priority, a large number for jobs that are to start first.
        account, quality: account, and quality of service (QOS).
    """

    label: str
    number: str
    array: str
    task: str
    user: str
    uid: str
    name: str
    state: str
    reason: str
    restarts: int
    code: int
    used: str
    left: str
    start: str
    nodes: int
    hosts: str
    folder: str
    log: str
    partition: str
    preemption: str
    submitted: str
    limit: str
    dependency: str
    priority: str
    account: str
    quality: str

    @property
    def preempted(self) -> bool:
        """Whether the job is in the grace time of a preemption."""
        return self.preemption[:1].isdigit()

    @property
    def active(self) -> bool:
        """Whether the job has processes or waits to start."""
        return self.state not in ENDED

    @property
    def refused(self) -> bool:
        """Whether the job failed before it had a host, like a job that sbatch gave no id for."""
        return self.state == "FAILED" and not self.hosts


def jobs(
    env: Mapping[str, str],
    labels: Sequence[str] = (),
    uid: int | None = None,
    partition: str = "",
) -> list[QueuedJob]:
    """Return the jobs with given labels, of one user or of a partition; the oldest first.

    Args:
        env: environment of the command.
        labels: `JOBID`, or `ARRAYJOBID_TASK`; jobs that are no longer in Slurm's list are omitted.
        uid: id of the user (default: all users).
        partition: name of the partition (default: all partitions).

    Raises:
        NoAnswerError: Slurm is absent or did not answer.
    """
    # A job's name may contain any text, so the separators are random.
    cut, end = (f"<{os.urandom(8).hex()}>" for _ in range(2))
    columns = ",".join(f"{column}:0{cut}" for column in _COLUMNS[:-1]) + f",{_COLUMNS[-1]}:0{end}"
    argv = ["squeue", "--noheader", "--states=all", f"--Format={columns}"]
    argv += [f"--job={','.join(labels)}"] if labels else []
    argv += [f"--user={uid}"] if uid is not None else []
    argv += [f"--partition={partition}"] if partition else []
    try:
        output = ask(argv, env)
    except NoAnswerError as error:
        if labels and "Invalid job id" in str(error):
            return []
        raise
    rows = [row.removeprefix("\n").split(cut) for row in output.split(end)[:-1]]
    if any(len(row) != len(_COLUMNS) for row in rows) or (output.strip() and not rows):
        raise NoAnswerError(f"squeue: no answer that can be read: {output[:200]!r}")
    try:
        return sorted(_joined([_job(row) for row in rows]), key=_order)
    except ValueError as error:
        raise NoAnswerError(f"squeue: no answer that can be read: {error}") from None


def _joined(listed: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Return the jobs with the parts of each heterogeneous job, 70+0 and 70+1, as one job, 70."""
    found: dict[str, QueuedJob] = {}
    for job in sorted(listed, key=lambda job: int(job.label.partition("+")[2] or 0)):
        label, plus, offset = job.label.partition("+")
        first = found.get(label)
        if not plus or first is None:
            # squeue lists a later part alone if it was asked for the id of that part.
            name = label if offset in ("", "0") else job.label
            found[name] = replace(job, label=name)
            continue
        hosts = ",".join(filter(None, (first.hosts, job.hosts)))
        found[label] = replace(first, nodes=first.nodes + job.nodes, hosts=hosts)
    return list(found.values())


def _job(row: Sequence[str]) -> QueuedJob:
    names = [field.name for field in fields(QueuedJob)]
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    values |= {
        "restarts": int(values["restarts"] or 0),
        "code": exit_code(values["code"] or "0"),
        "nodes": count(values["nodes"]),
        "dependency": values["dependency"].replace("(null)", ""),
    }
    job = QueuedJob(**values)
    # Slurm sets the status to 1 for such a job, which would be read as a signal.
    return replace(job, code=0) if job.refused else job


def _order(job: QueuedJob) -> tuple[int, bool, int]:
    """Return the sort key: by job id, then by array index, with waiting tasks last."""
    return int(job.array), not job.task.isdigit(), int(job.task) if job.task.isdigit() else 0
