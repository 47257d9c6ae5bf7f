"""State of a job or a step, what a job asks for, its time limit, and its remaining hosts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.slurm.asking import ask

# Longer timeout for the host list, because a wrong guess without it would lose hosts.
_SECONDS_FOR_HOSTS = 60.0

# States in which no process of a job runs or will run. Source: "JOB STATE CODES" of squeue(1).
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
    }
)
#: Seconds by which Slurm may send the signal of --signal before its time. Source: sbatch(1).
SIGNAL_EARLY = 60
# Slurm forgets a job some minutes after its end (MinJobAge).
FORGOTTEN = "unknown to Slurm"
_NOTHING = ("(null)", "0", "N/A")
_UNKNOWN_ID = re.compile(r"Invalid job id|not found|Invalid job array", re.IGNORECASE)

_LABEL = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?\Z", re.ASCII)
_STEP = re.compile(r"[0-9]{1,12}\Z", re.ASCII)
# The patterns include Slurm's adjacent keys, so that a job's name is not read as its state.
_END = re.compile(r" EndTime=([0-9]{1,12}) Deadline=")
_REQUEST = (
    re.compile(r" ReqNodeList=(?P<nodelist>\S+) ExcNodeList=(?P<exclude>\S+) NodeList="),
    re.compile(r" NumCPUs=\S+ (?:NumTasks=\S+ )?CPUs/Task=(?P<cpus>\S+) ReqB:S:C:T="),
    re.compile(r" MinCPUsNode=\S+ MinMemoryNode=(?P<memory>\S+) MinTmpDisk"),
    re.compile(r" MinTmpDiskNode=\S+ Features=(?P<constraint>\S+)"),
)
_STATE_AND_RESTARTS = re.compile(r" JobState=([A-Z_]+) Reason=.* Restarts=([0-9]+) BatchFlag=")


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of one job in Slurm.

    Attributes:
        name: Slurm's name of the state, such as RUNNING; "unknown to Slurm" if there is no such
            job.
        restarts: number of times that the job was requeued.
    """

    name: str
    restarts: int = 0

    @property
    def known(self) -> bool:
        """Whether the job is in Slurm's list; Slurm removes a job some time after its end."""
        return self.name != FORGOTTEN

    @property
    def active(self) -> bool:
        """Whether the job has processes or waits to start."""
        return self.known and self.name not in ENDED


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks for, beside its columns in squeue; empty for what it leaves to the cluster.

    Attributes:
        nodelist, exclude: nodes that it requires, and those that it does not use, as host lists.
        cpus: CPUs for each task.
        memory: memory of each node.
        constraint: features that its nodes must have.
    """

    nodelist: str = ""
    exclude: str = ""
    cpus: str = ""
    memory: str = ""
    constraint: str = ""

    @property
    def required(self) -> list[str]:
        """Names of the nodes that the job requires."""
        return expand(self.nodelist)

    @property
    def excluded(self) -> list[str]:
        """Names of the nodes that the job does not use."""
        return expand(self.exclude)


def requested(label: str, env: Mapping[str, str]) -> Request:
    """Return what a job asks for.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK` of an array's task.
        env: environment of the command.

    Raises:
        NoAnswerError: Slurm does not answer, or does not know the job.
    """
    shown = ask(["scontrol", "show", "job", "--oneliner", label], env)
    found: dict[str, str] = {}
    for pattern in _REQUEST:
        match = pattern.search(shown)
        found |= match.groupdict() if match else {}
    return Request(**{name: "" if text in _NOTHING else text for name, text in found.items()})


def is_label(text: str) -> bool:
    """Check whether a word is `JOBID` or `JOBID_TASK`."""
    return bool(_LABEL.match(text))


def job_state(label: str, env: Mapping[str, str]) -> JobState | None:
    """Return the state of a job, or None if Slurm is absent or does not answer.

    Each of the two commands, scontrol and squeue, has a timeout of 10 seconds.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK` of an array's task.
        env: environment of the command, with the user's PATH and SLURM_CONF.
    """
    if not is_label(label):
        return None
    # squeue as a second attempt: some sites reserve scontrol for administrators.
    squeue = ["squeue", "--noheader", "--states=all", f"--job={label}"]
    for argv, pattern in (
        (["scontrol", "show", "job", "--oneliner", label], _STATE_AND_RESTARTS),
        ([*squeue, "--Format=State:30,RestartCnt:12"], re.compile(r"([A-Z_]+) +([0-9]+)")),
    ):
        try:
            match = pattern.search(ask(argv, env))
        except NoAnswerError as error:
            if _UNKNOWN_ID.search(str(error)):
                return JobState(FORGOTTEN)
            continue
        if match:
            return JobState(match[1], int(match[2]))
    return None


def step_is_active(job_id: str, step: str, env: Mapping[str, str]) -> bool | None:
    """Check whether a step has not ended; return None if Slurm is absent or does not answer.

    Args:
        job_id: id of the job, not of its array.
        step: value of $SLURM_STEP_ID in the step.
        env: environment of the command.
    """
    if not (_STEP.match(job_id) and _STEP.match(step)):
        return None
    try:
        ask(["scontrol", "show", "step", "--oneliner", f"{job_id}.{step}"], env)
    except NoAnswerError as error:
        return False if _UNKNOWN_ID.search(str(error)) else None
    return True


def end_time(label: str, env: Mapping[str, str]) -> int | None:
    """Return the end of a job's time limit, in seconds since the epoch.

    The result is None if the job has no limit, or if Slurm is absent or does not answer.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK` of an array's task.
        env: environment of the command.
    """
    if not is_label(label):
        return None
    argv = ["scontrol", "show", "job", "--oneliner", label]
    try:
        # The format is that of strftime(3). Source: "ENVIRONMENT VARIABLES" of scontrol(1).
        end = _END.search(ask(argv, {**env, "SLURM_TIME_FORMAT": "%s"}))
    except NoAnswerError:
        return None
    return int(end[1]) if end else None


def hosts_left(job_ids: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the current hosts of a job as a Slurm host list, without the hosts that it lost.

    Args:
        job_ids: id of the job, or of each of its parts; for a task of an array, of this task.
        env: environment of the command.

    Raises:
        NoAnswerError: squeue is absent, failed, or did not answer within a minute.
    """
    # For the last task of an array, whose id is that of the array, squeue prints all tasks.
    argv = ["squeue", "--noheader", f"--job={','.join(job_ids)}", "--format=%A %N"]
    rows = [row.split() for row in ask(argv, env, _SECONDS_FOR_HOSTS).splitlines()]
    hosts = {row[0]: row[1] for row in rows if len(row) > 1 and row[0] in job_ids}
    return ",".join(hosts.values())
