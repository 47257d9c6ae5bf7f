"""Explanation of Slurm's states and reasons. Pure.

Source: JOB REASON CODES and JOB STATE CODES of squeue(1), and the Resource Limits guide.
"""

import re

from hpctrain.cluster.slurm import Job

__all__ = ["explained", "in_words", "plain"]

_REASONS = {
    "Resources": "waits for hosts to become free; it is the next in line",
    "Priority": "others with a higher priority come first",
    "Dependency": "waits for the jobs of its dependency",
    "DependencyNeverSatisfied": "what it waits for cannot happen any more: cancel it",
    "BeginTime": "waits a while after it was requeued, or for its --begin",
    "JobHeldUser": "held by you: scontrol release lets it go on",
    "JobHeldAdmin": "held by an administrator: ask them",
    "JobArrayTaskLimit": "other tasks of its array run; its throttle lets no more",
    "PartitionDown": "its partition is down: ask, or take another one",
    "PartitionInactive": "its partition is inactive: ask, or take another one",
    "PartitionConfig": "its partition has no such hosts: it would wait for ever",
    "PartitionNodeLimit": "more nodes than its partition allows or has: it would wait for ever",
    "PartitionTimeLimit": "a longer time than its partition allows: it would wait for ever",
    "ReqNodeNotAvail": "hosts that it needs are down, reserved, or needed for maintenance before "
    "it would end: a shorter time may let it start",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone: cancel it",
    "Licenses": "waits for a license",
    "NodeDown": "a host that it needs is down",
    "BadConstraints": "no host can do what it asks for: cancel it",
    "Cleaning": "its last start is still being tidied away",
    "Prolog": "its hosts are being prepared",
    "launch failed requeued held": "it could not be started, and is held: scontrol release",
    "JobLaunchFailure": "it could not be started: file system or host are to blame, or its folder",
    "NonZeroExitCode": "left with an error",
    "RaisedSignal": "ended by a signal",
    "TimeLimit": "its time was over",
    "OutOfMemory": "it needed more memory than it had asked for",
    "SystemFailure": "Slurm, the file system or the network failed",
    "InvalidAccount": "its account is not valid any more",
    "InvalidQOS": "its qos is not valid any more",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its qos may not use the partition or account",
    "FedJobLock": "waits for the other clusters of its federation",
}  # fmt: skip
# Advice for a job that waits, which does not apply to a job that has ended.
_ADVICE = re.compile(": (cancel it|it would wait for ever|ask.*|scontrol release.*)$")
# Such as QOSMaxJobsPerUserLimit, AssocGrpGRES, MaxJobsPerAccount: whose limit it is, and of what.
_WHOSE = {"QOS": "the qos", "Assoc": "your account", "MaxJobs": "the account or qos"}
_OF_WHAT = {
    "Jobs": "jobs that run", "Submit": "jobs that wait or run", "GRES": "GPUs", "Cpu": "CPUs",
    "CPU": "CPUs", "Mem": "memory", "Node": "nodes", "WallDuration": "time", "Wall": "time",
    "Minutes": "hours used up",
}  # fmt: skip


def explained(job: Job) -> str:
    """Return why a job waits, or how it ended; empty if its state is enough."""
    if job.lives:
        return in_words(job.reason)
    if job.refused:
        return f"Slurm refused it: {in_words(job.reason, ended=True) or 'it says no reason'}"
    notes = [f"exit code {job.code}"] if job.code else []
    # Without facts that add nothing: a wait before a cancellation, or a code that is not zero.
    if job.word not in ("COMPLETED", "CANCELLED") and job.reason != "NonZeroExitCode":
        notes.append(in_words(job.reason, ended=True))
    return "; ".join(note for note in notes if note)


def in_words(reason: str, ended: bool = False) -> str:
    """Return the meaning of a reason, followed by Slurm's own word; only the word if unknown.

    Args:
        reason: Slurm's reason for a job.
        ended: whether to leave out the advice for a job that waits.
    """
    reason = plain(reason).strip("() ")
    if reason in ("", "None", "N/A"):
        return ""
    # "ReqNodeNotAvail, UnavailableNodes:node[1-4]", "ReqNodeNotAvail(Unavailable:node1)"
    head = reason.partition(",")[0].partition("(")[0].strip()
    if meaning := _REASONS.get(head) or _limit(head):
        meaning = _ADVICE.sub("", meaning) if ended else meaning
        return f"{meaning} ({reason})"
    return reason


def _limit(reason: str) -> str:
    for start, whose in _WHOSE.items():
        if reason.startswith(start):
            for part, what in _OF_WHAT.items():
                if part in reason[3:]:
                    return f"a limit of {whose}: {what}"
            return f"a limit of {whose}"
    return ""


def plain(text: str) -> str:
    r"""Return the text with non-printable characters written as escapes, such as \x1b."""
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))
