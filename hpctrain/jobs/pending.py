"""Why a job waits: what Slurm knows, which of its options count, and what would start sooner.

Nothing is guessed: each line has its source, a command of Slurm, or is left out.
"""

import re
import time
from collections.abc import Iterator, Mapping

from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.jobs.units import slurm_date, slurm_seconds

__all__ = ["lines", "since"]

_LEAST_TIME = 600  # seconds; no job is advised to ask for less
_MOST_PARTITIONS = 2
_SECONDS_TO_ANSWER = 10.0
# "sbatch: Job 7 to start at 2026-11-21T10:00:00 using 2 processors on nodes …"
_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_WORTH = 60.0  # seconds by which another option has to start sooner
# The options that a reason is about, by the beginning of the reason.
_OPTIONS = {
    ("Resources", "Priority", "ReqNodeNotAvail", "BadConstraints", "PartitionConfig"): (
        *("nodes", "cpus-per-task", "memory", "constraint", "nodelist", "exclude"),
        *("time", "partition"),
    ),
    ("PartitionTimeLimit",): ("time", "partition"),
    ("PartitionNodeLimit",): ("nodes", "partition"),
    ("PartitionDown", "PartitionInactive"): ("partition",),
    ("Dependency",): ("dependency",),
    ("QOS",): ("qos",),
    ("Assoc", "MaxJobs"): ("account",),
}


def since(job: slurm.QueuedJob) -> str:
    """Return since when a job waits, and how long that is; empty if that is unknown."""
    begin = slurm_date(job.submitted)
    if job.state != "PENDING" or begin is None:
        return ""
    return f"since {job.submitted.replace('T', ' ')} ({_duration(time.time() - begin)})"


def lines(job: slurm.QueuedJob, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return lines about a pending job, each with its name; none for another job.

    Slurm is asked at most eight times.
    """
    if job.state != "PENDING":
        return []
    found = [("waits:", f"{text} (squeue)") for text in [since(job)] if text]
    found += [("options:", text) for text in [_options(job, env)] if text]
    if (ahead := _ahead(job, env)) is not None:
        number = f"{ahead} pending job{'s' * (ahead != 1)}"
        has = "has" if ahead == 1 else "have"
        found.append(("before it:", f"{number} of its partition {has} a higher priority (squeue)"))
    if job.task == "N/A" and job.reason in ("Resources", "Priority", "ReqNodeNotAvail"):
        found += [("sooner:", text) for text in _sooner(job, env)]
    return found


def _options(job: slurm.QueuedJob, env: Mapping[str, str]) -> str:
    """Return the options of the job that Slurm's reason is about, and the limits they meet."""
    reason = job.reason.strip("()")
    names = next((names for starts, names in _OPTIONS.items() if reason.startswith(starts)), ())
    values = {
        "nodes": job.nodes, "time": job.limit, "partition": job.partition, "qos": job.quality,
        "dependency": job.dependency, "account": job.account,
    }  # fmt: skip
    asked = _asked(job, env) if "nodelist" in names else {}
    values |= asked
    text = " ".join(f"--{name} {printable(values[name])}" for name in names if values.get(name))
    if job.reason.startswith("Partition") and text:
        text += _limits(job.partition, env)
    source = "squeue, scontrol" if any(asked.values()) else "squeue"
    return f"{text} ({source})" if text else ""


def _asked(job: slurm.QueuedJob, env: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a job that squeue does not list."""
    try:
        asked = slurm.requested(job.number, env)
    except slurm.NoAnswerError:
        return {}
    return {
        "cpus-per-task": "" if asked.cpus == "1" else asked.cpus, "memory": asked.memory,
        "constraint": asked.constraint, "nodelist": asked.nodelist, "exclude": asked.exclude,
    }  # fmt: skip


def _limits(partition: str, env: Mapping[str, str]) -> str:
    """Return the longest time of a partition, and the number and the size of its nodes."""
    own = [one for one in slurm.partitions(env) if one.name == partition]
    if not own:
        return ""
    size = ", ".join(one.size for one in own)
    return f"; {printable(partition)} has {size}, and allows {own[0].limit} (sinfo)"


def _ahead(job: slurm.QueuedJob, env: Mapping[str, str]) -> int | None:
    """Return how many pending jobs of the partition have a higher priority; None if unknown.

    A site may hide the jobs of other users: then only the user's own are counted.
    """
    if not job.priority.isdigit():
        return None
    try:
        others = slurm.jobs(env, partition=job.partition)
    except slurm.NoAnswerError:
        return None
    return sum(
        other.state == "PENDING"
        and other.priority.isdigit()
        and int(other.priority) > int(job.priority)
        for other in others
    )


def _sooner(job: slurm.QueuedJob, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the options with which a new job of the same script would start sooner."""
    try:
        script = slurm.batch_script(job.number, env).encode(errors="surrogateescape")
    except slurm.NoAnswerError:
        return
    own = [f"--time={job.limit}", f"--nodes={job.nodes}", f"--partition={job.partition}"]
    as_it_is = _start(script, own, env)
    if as_it_is is None:
        return
    for option in _others(job, env):
        start = _start(script, [*own, option], env)
        if start is not None and as_it_is - start > _WORTH:
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(start))
            yield (
                f"{option}: a new job would start at {at}, {_duration(as_it_is - start)} sooner "
                "(sbatch --test-only)"
            )


def _others(job: slurm.QueuedJob, env: Mapping[str, str]) -> Iterator[str]:
    """Yield options to try instead of those of the job: a few."""
    limit = slurm_seconds(job.limit)
    for share in (2, 4):
        if limit and limit // share >= _LEAST_TIME:
            yield f"--time={-(-limit // share // 60)}"
    if job.nodes > 1:
        yield f"--nodes={job.nodes // 2}"
    names = dict.fromkeys(one.name for one in slurm.partitions(env) if one.up)
    for name in [name for name in names if name != job.partition][:_MOST_PARTITIONS]:
        yield f"--partition={name}"


def _start(script: bytes, options: list[str], env: Mapping[str, str]) -> int | None:
    """Return when a new job with these options would start; None if Slurm does not tell."""
    try:
        answer = slurm.sbatch(script, env, ["--test-only", *options], _SECONDS_TO_ANSWER)
    except slurm.NoAnswerError:
        return None
    match = _START.search(answer.message)
    return slurm_date(match[1]) if match else None


def _duration(seconds: float) -> str:
    """Return a time in words: 40 s, 12 min, 3 h 5 min, 2 days 4 h."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // 86400} days {whole // 3600 % 24} h"
