"""Explanation of Slurm's states and reasons, and of its absence. Pure.

Source: JOB REASON CODES and JOB STATE CODES of squeue(1), and the Resource Limits guide.
"""

from hpctrain.cluster.slurm import QueuedJob
from hpctrain.cluster.texts import printable
from hpctrain.errors import StartError

__all__ = ["absent", "bare", "explained", "in_words", "notes"]

_REASONS = {
    "Resources": "waits for hosts to become free; it is the next in line",
    "Priority": "jobs with a higher priority are first",
    "Dependency": "waits for the jobs of its dependency",
    "DependencyNeverSatisfied": "its dependency can no longer be satisfied: cancel it",
    "BeginTime": "waits a while after it was requeued, or for its --begin",
    "JobHeldUser": "held by you: scontrol release removes the hold",
    "JobHeldAdmin": "held by an administrator: ask them",
    "JobArrayTaskLimit": "as many tasks of its array run as its throttle allows",
    "PartitionDown": "its partition is down: ask an administrator, or use another one",
    "PartitionConfig": "its partition has no such hosts: it would never start",
    "PartitionNodeLimit": "more nodes than its partition allows or has: it would never start",
    "PartitionTimeLimit": "a longer time than its partition allows: it would never start",
    "ReqNodeNotAvail": "hosts that it needs are down, reserved, or needed for maintenance before "
    "it would end: a shorter time may let it start",
    "BadConstraints": "no host satisfies its request",
    "launch failed requeued held": "it could not be started, and is held: scontrol release",
    "JobLaunchFailure": "it could not be started: check its folder, the file system and the host",
    "NonZeroExitCode": "exited with an error",
    "TimeLimit": "it reached its time limit",
    "QOSNotAllowed": "its qos may not use the partition or account",
    "OutOfMemory": "it used more memory than it had requested",
}  # fmt: skip
# Owners of the limits in reasons such as QOSMaxJobsPerUserLimit, AssocGrpGRES, MaxJobsPerAccount.
_OWNERS = {"QOS": "the qos", "Assoc": "your account", "MaxJobs": "the account or qos"}


def absent(reason: str, *instead: str) -> StartError:
    """Return the error for a missing command of Slurm, or one that did not answer.

    Args:
        reason: why there is no answer; has "on the PATH" if the command is missing.
        instead: what to do on a host without Slurm.
    """
    if "on the PATH" in reason:
        return StartError("HT815.no-slurm-commands", reason=reason, fixes=instead)
    return StartError("HT816.no-answer", reason=reason)


def notes(job: QueuedJob) -> str:
    """Return the exit code of a job that has ended, and `explained`; empty without both."""
    code = f"exit code {job.code}" if job.code and not job.active else ""
    return "; ".join(note for note in (code, explained(job)) if note)


def explained(job: QueuedJob) -> str:
    """Return why a job waits or has ended; empty if its state and exit code are enough."""
    if job.active:
        return in_words(job.reason)
    if job.refused:
        return f"Slurm refused it: {in_words(job.reason) or 'no reason given'}"
    # Omit reasons without new facts: of the wait before a cancellation, or that a code is not zero.
    if job.state in ("COMPLETED", "CANCELLED") or job.reason == "NonZeroExitCode":
        return ""
    return in_words(job.reason)


def bare(reason: str) -> str:
    """Return Slurm's reason without parentheses; empty if there is none."""
    reason = reason.strip("() ")
    return "" if reason in ("None", "N/A") else reason


def in_words(reason: str) -> str:
    """Return the meaning of a reason, followed by the reason itself; only the reason if unknown."""
    reason = printable(bare(reason))
    # "ReqNodeNotAvail, UnavailableNodes:node[1-4]", "ReqNodeNotAvail(Unavailable:node1)"
    head = reason.partition(",")[0].partition("(")[0].strip()
    owners = (owner for start, owner in _OWNERS.items() if head.startswith(start))
    limit = next((f"a limit of {owner}" for owner in owners), "")
    meaning = _REASONS.get(head, limit)
    return f"{meaning} ({reason})" if meaning else reason
