"""Whether a job or a step lives, when a job ends, and which hosts it has left."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = [
    "ENDED",
    "FORGOTTEN",
    "JobState",
    "end_time",
    "hosts_left",
    "is_label",
    "job_state",
    "step_lives",
]

# squeue of a host list, where a wrong guess would cost hosts.
_SECONDS_FOR_HOSTS = 60.0

# In these no process of a job runs, and none will. Source: "JOB STATE CODES" of squeue(1).
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
    }
)
# Slurm forgets a job some minutes after its end (MinJobAge).
FORGOTTEN = "unknown to Slurm"
_NOT_THERE = re.compile(r"Invalid job id|not found|Invalid job array", re.IGNORECASE)

_LABEL = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?\Z", re.ASCII)
_STEP = re.compile(r"[0-9]{1,12}\Z", re.ASCII)
# The keys beside are Slurm's own, so that a job's name is not taken for its state.
_END = re.compile(r" EndTime=([0-9]{1,12}) Deadline=")
_SHOWN = re.compile(r" JobState=([A-Z_]+) Reason=.* Restarts=([0-9]+) BatchFlag=")


@dataclass(frozen=True, slots=True)
class JobState:
    """What Slurm says of one job.

    Attributes:
        word: in Slurm's words, such as RUNNING; "unknown to Slurm" where it knows no such job.
        restarts: how often it was requeued.
    """

    word: str
    restarts: int = 0

    @property
    def known(self) -> bool:
        """Whether Slurm knows the job; one that ended long ago it does not."""
        return self.word != FORGOTTEN

    @property
    def lives(self) -> bool:
        """Whether it has processes, or waits to have some."""
        return self.known and self.word not in ENDED


def is_label(word: str) -> bool:
    """Whether a word is `JOBID` or `JOBID_TASK`."""
    return bool(_LABEL.match(word))


def job_state(label: str, env: Mapping[str, str]) -> JobState | None:
    """The state of a job; None where Slurm is absent or does not answer within 10 seconds.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK` of an array's task.
        env: for the command, as the user's PATH and SLURM_CONF.
    """
    if not is_label(label):
        return None
    # squeue where scontrol, an administrator's tool to some sites, is not given to users.
    squeue = ["squeue", "--noheader", "--states=all", f"--job={label}"]
    for argv, pattern in (
        (["scontrol", "show", "job", "--oneliner", label], _SHOWN),
        ([*squeue, "--Format=State:30,RestartCnt:12"], re.compile(r"([A-Z_]+) +([0-9]+)")),
    ):
        try:
            found = pattern.search(ask(argv, env))
        except NoAnswerError as error:
            if _NOT_THERE.search(str(error)):
                return JobState(FORGOTTEN)
            continue
        if found:
            return JobState(found[1], int(found[2]))
    return None


def step_lives(job_id: str, step: str, env: Mapping[str, str]) -> bool | None:
    """Whether a step of a job has not ended; None where Slurm is absent or does not answer.

    Args:
        job_id: the job's own number, not that of its array.
        step: the value of its $SLURM_STEP_ID.
        env: for the command.
    """
    if not (_STEP.match(job_id) and _STEP.match(step)):
        return None
    try:
        ask(["scontrol", "show", "step", "--oneliner", f"{job_id}.{step}"], env)
    except NoAnswerError as error:
        return False if _NOT_THERE.search(str(error)) else None
    return True


def end_time(label: str, env: Mapping[str, str]) -> int | None:
    """When a job's time limit strikes, in seconds since the epoch.

    None where it has no limit, and where Slurm is absent or does not answer.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK` of an array's task.
        env: for the command.
    """
    if not is_label(label):
        return None
    try:
        # The format is one of strftime(3): "ENVIRONMENT VARIABLES" of scontrol(1).
        shown = ask(
            ["scontrol", "show", "job", "--oneliner", label], {**env, "SLURM_TIME_FORMAT": "%s"}
        )
    except NoAnswerError:
        return None
    found = _END.search(shown)
    return int(found[1]) if found else None


def hosts_left(job_id: str, env: Mapping[str, str]) -> str:
    """The hosts that a job has now, as a Slurm host list: without those that it has lost.

    Raises:
        NoAnswerError: squeue is absent, failed, or did not answer within a minute.
    """
    argv = ["squeue", "--noheader", "--job", job_id, "--format=%N"]
    return ask(argv, env, _SECONDS_FOR_HOSTS).strip()
