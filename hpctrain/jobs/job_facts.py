"""Facts about a job: its run and how far it is, why it waits, and why it has failed.

Nothing is guessed: each line about a job that waits has its source, a command of Slurm, or is
omitted.

Source of states and reasons: JOB REASON CODES and JOB STATE CODES of squeue(1), and the Resource
Limits guide.
"""

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.slurm import QueuedJob
from hpctrain.cluster.texts import printable, shortened
from hpctrain.errors import exit_codes
from hpctrain.jobs.units import slurm_date, slurm_seconds

if TYPE_CHECKING:
    from hpctrain.rundir.effective_time import EffectiveTime


# Bytes that are read from the end of a file: some hundred rows of metrics.jsonl.
_TAIL = 2**16
# Number of newest run folders to search for a job without a folder of its name.
_MOST_RUNS = 300
# A line of a script that sets the run directory.
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?HPCTRAIN_RUN_DIR=")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as recorded in its directory.

    Attributes:
        status: done, stopped, failed or given-up; empty if the run has not ended.
        step, epoch, loss, speed: newest values; None if there are none. Speed in samples/s.
        end, left: steps of the whole run, and estimated seconds to its end, while it trains; None
            if they are unknown.
        reason: why the run ended, if that is recorded.
        effective: where the time of the run went; None if that is not recorded.
    """

    status: str = ""
    step: int | None = None
    epoch: int | None = None
    loss: float | None = None
    speed: float | None = None
    end: int | None = None
    left: float | None = None
    reason: str = ""
    effective: "EffectiveTime | None" = None


def progress(path: Path) -> Progress | None:
    """Return the progress of a run, of several the one launched last; None if there is no run."""
    directory = rundir.RunDirectory(path).current()
    # Here and below without pathlib, which raises if the user may not read a folder.
    if not os.path.exists(directory.identity) and not os.path.exists(directory.metrics):
        return None
    summary = rundir.json_object(end_of(directory.summary))
    newest: dict[str, Any] = {}
    for row in _last_rows(directory.metrics):
        newest |= row
    last = rundir.json_object(end_of(directory.last_step))
    return Progress(
        _text(summary.get("status")),
        _number(summary.get("step", newest.get("step")), int),
        _number(newest.get("epoch"), int),
        _number(newest.get("loss"), float),
        _number(newest.get("samples_per_second"), float),
        _number(last.get("end"), int),
        _number(last.get("left"), float),
        _text(summary.get("reason")),
        _effective(directory),
    )


def _effective(directory: rundir.RunDirectory) -> "EffectiveTime | None":
    from hpctrain.rundir.effective_time import measure

    try:
        return measure(directory)
    except OSError:  # the run of another user
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return kind(value)
    except (OverflowError, ValueError):  # such as the integer of infinity
        return None


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a .jsonl file, without invalid ones."""
    return [*filter(None, map(rundir.json_object, end_of(path).splitlines()))]


def end_of(path: Path) -> bytes:
    """Return the last bytes of a file; empty if it cannot be read: it may be of another user."""
    try:
        with open(path, "rb", opener=rundir.open_regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read(_TAIL)
    except (OSError, ValueError):
        return b""


def run_of(
    job: slurm.QueuedJob,
    env: Mapping[str, str],
    named: bool = True,
    scripts: dict[str, str] | None = None,
) -> Path | None:
    """Return the run directory of a job; None if it has none yet, or if it is unknown.

    The job's script is requested from Slurm only if no folder has the name of the job.

    Args:
        job: Slurm's record of the job.
        env: environment for Slurm's commands.
        named: whether the user has named the job. If not, Slurm is not queried for a job that has
            not started: a table may have many of them, and they could only have an earlier run.
        scripts: batch scripts by the numbers of jobs, as found so far; new ones are added.
    """
    scripts = {} if scripts is None else scripts
    if "[" in job.label:  # pending tasks of an array
        return None
    default = Path(job.folder, "runs", f"{job.name.replace('/', '_')}-{job.label}")
    if os.path.isdir(default):
        return default
    if not named and job.state == "PENDING" and not job.restarts:
        return None
    if job.number not in scripts:
        scripts[job.number] = ""
        with contextlib.suppress(slurm.NoAnswerError):
            scripts[job.number] = slurm.batch_script(job.number, env)
    path = _from_script(scripts[job.number], job)
    # The job may continue the run of an earlier job: HPCTRAIN_RUN_DIR=… at its submission.
    return (
        path if path and os.path.isdir(path) else _from_starts(Path(job.folder, "runs"), job.label)
    )


def _from_script(script: str, job: slurm.QueuedJob) -> Path | None:
    """Return the run directory set in the script; None if only a shell could expand it."""
    for line in script.replace("\\\n", " ").splitlines():
        with contextlib.suppress(ValueError):  # no words of a shell
            words = shlex.split(_ASSIGNED.sub("--run-dir=", line), comments=True)
            given = rundir.given(words)
            if given and not {"$", "`"} & {*given}:
                # `hpctrain run --run-dir` adds the index itself; without an array it is "N/A".
                path, task = Path(job.folder, given), Path(job.folder, given, job.task)
                return task if os.path.isdir(task) else path
    return None


def _from_starts(runs: Path, label: str) -> Path | None:
    """Return the newest run that this job was the last to start."""
    found = [*runs.glob("*/starts.jsonl"), *runs.glob("*/*/starts.jsonl")]
    for file in sorted(found, key=os.path.getmtime, reverse=True)[:_MOST_RUNS]:
        if last_job(file.parent) == label:
            return runs / file.relative_to(runs).parts[0]
    return None


def last_start(path: Path) -> dict[str, Any]:
    """Return the newest line of the starts.jsonl of a run; empty if there is none.

    Of several runs in the folder, that of the one launched last.
    """
    rows = _last_rows(rundir.RunDirectory(path).current().starts)
    return rows[-1] if rows else {}


def last_job(path: Path) -> str:
    """Return the label of the job that was the last to start a run; empty for no job of Slurm."""
    job = last_start(path).get("job")
    if not isinstance(job, dict):
        return ""
    task = job.get("array_task")
    label = f"{job.get('job_id')}" if task is None else f"{job.get('array_job_id')}_{task}"
    return label if slurm.is_label(label) else ""


def label_of(path: Path) -> str:
    """Return the job of a run directory: from its last start, or without starts from its name.

    Empty if no job has run there.
    """
    if os.path.exists(rundir.RunDirectory(path).current().starts):
        return last_job(path)
    _, dash, label = path.name.rpartition("-")
    return label if dash and slurm.is_label(label) else ""


# --- why a job has failed

_LONGEST_CAUSE = 500
#: How a run ends that has failed.
FAILED = (exit_codes.STATUS[exit_codes.FAILED], exit_codes.STATUS[exit_codes.GIVEN_UP])
# The last line of `hpctrain run`, or an error of hpctrain, with the rank's number before it.
_CONCLUSION = re.compile(
    r"(?:[0-9]+: )?hpctrain: (?:error: (.+)|(given up: .+)"
    r"|job \S+ is not started again: (.+)"
    r"|(rank [0-9]+ .*(?:failed first|ended), .+?)(?:\. Its last lines:)?\Z)"
)
# Lines that are no cause: what Slurm adds when the ranks have ended, and what hpctrain advises.
_NO_CAUSE = re.compile(
    r"srun: |slurmstepd|\s*\Z"
    r"|(?:[0-9]+: )?(?:  (?:expected|fix|or|more): |hpctrain: its checkpoints)"
)


def state_text(state: str, code: int) -> str:
    """Return the state of a job in words: Slurm's own, but "stopped" for a stopped job.

    Args:
        state: state as Slurm names it.
        code: exit code of the job.
    """
    if state == "FAILED" and code == exit_codes.STOPPED:
        return exit_codes.STATUS[exit_codes.STOPPED]
    return printable(state).lower()


def cause(run: Progress | None, log: Path | None, code: int | None, last_line: bool) -> str:
    """Return in one line which rank failed first, on which host, with which error; else empty.

    For a job that was stopped, return by what.

    Args:
        run: progress of the job's run. It has the cause only if the job had a Session.
        log: log of the job.
        code: exit code of the job; None if it is unknown. A run with another end is an earlier one.
        last_line: whether the last line of the log counts if no other line has the cause.
    """
    status = exit_codes.STATUS.get(code or exit_codes.FAILED, FAILED[0])
    if run is not None and run.reason and (code is None or run.status == status):
        text = run.reason
    else:
        tail = end_of(log) if log is not None else b""
        lines = tail.decode(errors="replace").splitlines()
        conclusions = [match for match in map(_CONCLUSION.match, lines) if match]
        others = [line for line in lines if not _NO_CAUSE.match(line)]
        text = "".join(others[-1:]) if last_line else ""
        if conclusions:
            text = conclusions[-1][conclusions[-1].lastindex or 0]
    return shortened(printable(text.strip()), _LONGEST_CAUSE)


# --- what Slurm says of a job

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


def notes(job: QueuedJob) -> str:
    """Return the exit code of a job that has ended, and `explained`; empty without both."""
    code = f"exit code {job.code}" if job.code and not job.active else ""
    return "; ".join(note for note in (code, explained(job)) if note)


def explained(job: QueuedJob) -> str:
    """Return why a job waits or has ended; empty if its state and exit code are enough."""
    if job.active:
        return reason_text(job.reason)
    if job.refused:
        return f"Slurm refused it: {reason_text(job.reason) or 'no reason given'}"
    # Omit reasons without new facts: of the wait before a cancellation, or that a code is not zero.
    if job.state in ("COMPLETED", "CANCELLED") or job.reason == "NonZeroExitCode":
        return ""
    return reason_text(job.reason)


def bare(reason: str) -> str:
    """Return Slurm's reason without parentheses; empty if there is none."""
    reason = reason.strip("() ")
    return "" if reason in ("None", "N/A") else reason


def reason_text(reason: str) -> str:
    """Return the meaning of a reason, followed by the reason itself; only the reason if unknown."""
    reason = printable(bare(reason))
    # "ReqNodeNotAvail, UnavailableNodes:node[1-4]", "ReqNodeNotAvail(Unavailable:node1)"
    head = reason.partition(",")[0].partition("(")[0].strip()
    owners = (owner for start, owner in _OWNERS.items() if head.startswith(start))
    limit = next((f"a limit of {owner}" for owner in owners), "")
    meaning = _REASONS.get(head, limit)
    return f"{meaning} ({reason})" if meaning else reason


# --- why a job waits

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


def waiting_since(job: slurm.QueuedJob) -> str:
    """Return since when a job waits, and how long that is; empty if that is unknown."""
    begin = slurm_date(job.submitted)
    if job.state != "PENDING" or begin is None:
        return ""
    return f"since {job.submitted.replace('T', ' ')} ({_duration(time.time() - begin)})"


def waiting_lines(job: slurm.QueuedJob, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return lines about a pending job, each with its name; none for another job.

    Slurm is asked at most eight times.
    """
    if job.state != "PENDING":
        return []
    found = [("waits:", f"{text} (squeue)") for text in [waiting_since(job)] if text]
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
    as_it_is = _expected_start(script, own, env)
    if as_it_is is None:
        return
    for option in _others(job, env):
        start = _expected_start(script, [*own, option], env)
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


def _expected_start(script: bytes, options: list[str], env: Mapping[str, str]) -> int | None:
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
