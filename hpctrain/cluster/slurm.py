"""The interface to Slurm: no other package runs Slurm's commands.

A cluster may have no Slurm, a container may lack its commands, and a busy controller may answer
late. These cases are normal: the result is `None` or `NoAnswerError`, and a run never fails.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hpctrain.cluster.commands import LateAnswerError, NoAnswerError, run
from hpctrain.cluster.env_vars import number
from hpctrain.cluster.hostlist import compress, expand

__all__ = [
    "ENDED",
    "FORGOTTEN",
    "Answer",
    "Ended",
    "JobState",
    "NoAnswerError",
    "Partition",
    "QueuedJob",
    "accounts",
    "batch_script",
    "cancel",
    "end_time",
    "ended",
    "excludable",
    "exclude",
    "hosts_left",
    "hosts_of_parts",
    "ids_of_parts",
    "is_label",
    "job_state",
    "jobs",
    "largest_memory",
    "of_all_parts",
    "partitions",
    "qualities",
    "requeue",
    "requeue_unended",
    "requeues_preempted",
    "sbatch",
    "signal_batch",
    "slurmd_address",
    "step_is_active",
]

SECONDS_TO_ANSWER = 10.0


def ask(argv: Sequence[str], env: Mapping[str, str], seconds: float | None = None) -> str:
    """Run a command and return its standard output.

    Args:
        argv: command and its arguments.
        env: environment of the command.
        seconds: timeout in seconds (default: 10).

    Raises:
        NoAnswerError: the command is missing, took too long, or failed; the text has its standard
            error.
    """
    # SQUEUE_STATES and similar variables, set by the user for lists, would filter the output.
    clean = {name: value for name, value in env.items() if not name.startswith("SQUEUE_")}
    done = run(argv, seconds or SECONDS_TO_ANSWER, clean)
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NoAnswerError(f"{argv[0]}: {message}")
    return done.stdout


# The state of a job or a step, the end of a job's time limit, and a job's remaining hosts.

# Longer timeout for the host list, because a wrong guess without it would lose hosts.
_SECONDS_FOR_HOSTS = 60.0

# States in which no process of a job runs or will run. Source: "JOB STATE CODES" of squeue(1).
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
    }
)
# Slurm forgets a job some minutes after its end (MinJobAge).
FORGOTTEN = "unknown to Slurm"
_UNKNOWN_ID = re.compile(r"Invalid job id|not found|Invalid job array", re.IGNORECASE)

_LABEL = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?\Z", re.ASCII)
_STEP = re.compile(r"[0-9]{1,12}\Z", re.ASCII)
# The patterns include Slurm's adjacent keys, so that a job's name is not read as its state.
_END = re.compile(r" EndTime=([0-9]{1,12}) Deadline=")
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


# The jobs in the controller's list: waiting, running and recently ended jobs.

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
        nodes: number of hosts.
        hosts: Slurm host list; empty while the job waits.
        folder: working directory of the job.
        log: path of the log, with the patterns of its name, such as %j.
        partition: partition of the job.
        preemption: time at which it was preempted and began its grace time; "N/A" if it was not.
        submitted: time of its submission, or of its last requeue, YYYY-MM-DDTHH:MM:SS.
        limit: time limit in Slurm's format.
        dependency: jobs that it waits for, such as afterok:71(unfulfilled); empty or "(null)" if
            there are none.
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
    nodes: str
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
        nodes = str(int(first.nodes) + int(job.nodes))
        hosts = ",".join(filter(None, (first.hosts, job.hosts)))
        found[label] = replace(first, nodes=nodes, hosts=hosts)
    return list(found.values())


def _job(row: Sequence[str]) -> QueuedJob:
    restarts, code = int(row[9] or 0), _exit_code(row[10] or "0")
    texts = [*row[:9], *row[11:]]
    names = [field.name for field in fields(QueuedJob) if field.name not in ("restarts", "code")]
    job = QueuedJob(restarts=restarts, code=code, **dict(zip(names, texts, strict=True)))
    # Slurm sets the status to 1 for such a job, which would be read as a signal.
    return replace(job, code=0) if job.refused else job


def _exit_code(text: str) -> int:
    """Return the exit code from the status of wait(2), or from CODE:SIGNAL (Slurm 24.11)."""
    if ":" in text:
        code, signal = map(int, text.split(":"))
    else:
        code, signal = int(text) >> 8 & 0xFF, int(text) & 0x7F
    return code or (128 + signal if signal else 0)


def _order(job: QueuedJob) -> tuple[int, bool, int]:
    """Return the sort key: by job id, then by array index, with waiting tasks last."""
    return int(job.array), not job.task.isdigit(), int(job.task) if job.task.isdigit() else 0


# Commands that submit a script, and cancel or requeue a job.

_VERSION = re.compile(r"slurm\S* (\d+)\.(\d+)")
_REQUEUES_PREEMPTED = (24, 5)
# sbatch tries again while the controller is busy, and for one minute if there is no slurm.conf.
_SECONDS_TO_SUBMIT = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of sbatch.

    Attributes:
        code: exit code of sbatch; 0 if the job was accepted.
        job: id of the job; empty if there is none.
        message: standard error of sbatch, to show to the user.
    """

    code: int
    job: str
    message: str


def sbatch(
    script: bytes,
    env: Mapping[str, str],
    options: Sequence[str] = (),
    seconds: float = _SECONDS_TO_SUBMIT,
) -> Answer:
    """Submit a script through standard input.

    Args:
        script: content of the batch script.
        env: environment of sbatch, which Slurm passes to the job.
        options: options of sbatch, which override those in the script.
        seconds: time to wait for the answer.

    Raises:
        NoAnswerError: there is no sbatch, or it did not answer in time.
    """
    try:
        done = run(["sbatch", "--parsable", *options], seconds, env, text=script)
    except LateAnswerError as error:
        raise NoAnswerError(f"{error}; the job may be accepted still") from None
    # JOBID or JOBID;CLUSTER; a site's wrapper may print more text before it.
    job = re.search(r"^([0-9]+)(?:;\S*)?\s*\Z", done.stdout, re.MULTILINE)
    return Answer(done.returncode, job[1] if job else "", done.stderr.strip())


def batch_script(job: str, env: Mapping[str, str]) -> str:
    """Return the batch script of one of the user's own jobs.

    Raises:
        NoAnswerError: the job has no batch script, or Slurm did not answer.
    """
    return ask(["scontrol", "write", "batch_script", job, "-"], env)


def cancel(labels: Sequence[str], env: Mapping[str, str]) -> None:
    """Cancel jobs; jobs that have ended do not change.

    Raises:
        NoAnswerError: the command failed; the text has Slurm's reason.
    """
    ask(["scancel", *labels], env)


def signal_batch(label: str, name: str, env: Mapping[str, str]) -> None:
    """Send a signal to the batch script of a job, as Slurm does before a preemption.

    Raises:
        NoAnswerError: the command failed; the text has Slurm's reason.
    """
    ask(["scancel", "--batch", f"--signal={name}", label], env)


def requeues_preempted(label: str, partition: str, env: Mapping[str, str]) -> bool:
    """Check whether Slurm requeues a job that ends in the grace time of a preemption.

    Slurm does so from 24.05 on, for a job with --requeue whose preemption is by the priority of
    its partition, with PreemptMode=REQUEUE. There, a job that calls `scontrol requeue` in that time
    is started once more after it has finished. Earlier versions let the job end. Source:
    `_slurm_rpc_complete_batch_script` in slurmctld; seen with 22.05, 24.11 and 26.05.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        partition: partition of the job.
        env: environment of the commands.

    Returns:
        The result; False if Slurm does not answer, as a second start does less harm than none.
    """
    try:
        version = _VERSION.search(ask(["scontrol", "--version"], env))
        if version is None or (int(version[1]), int(version[2])) < _REQUEUES_PREEMPTED:
            return False
        return all(
            text in ask(["scontrol", *command], env)
            for command, text in (
                (["show", "job", "--oneliner", label], " Requeue=1 "),
                (["show", "partition", "--oneliner", partition], " PreemptMode=REQUEUE "),
                (["show", "config"], "preempt/partition_prio"),
            )
        )
    except NoAnswerError:
        return False


def requeue_unended(label: str, env: Mapping[str, str]) -> None:
    """End the job of this process and put it back into the queue; a cancelled job stays cancelled.

    Raises:
        NoAnswerError: the command failed; the text has Slurm's reason.
    """
    # Without `incomplete`, Slurm would also requeue a job that was just cancelled.
    ask(["scontrol", "requeue", "incomplete", label], env)


def requeue(label: str, env: Mapping[str, str]) -> None:
    """End a job and put it back into the queue with the same id.

    Raises:
        NoAnswerError: the command failed; the text has Slurm's reason.
    """
    ask(["scontrol", "requeue", label], env)


# Slurm's accounting, if the site has one: ended jobs, and the accounts of a user.

_SIZE = re.compile(r"([0-9.]+)([KMGT]?)\Z")


@dataclass(frozen=True, slots=True)
class Ended:
    """The record of a job in Slurm's accounting.

    Attributes:
        label: label of the job, such as 70 or 70_3.
        state: state of the job; one of the end states, unless the accounting is late.
        code: exit code, or 128 plus the signal that ended the job.
    """

    label: str
    state: str
    code: int


def ended(label: str, env: Mapping[str, str]) -> list[Ended]:
    """Return the records of a job, or of all tasks of an array, from their last start.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        env: environment of the command.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    output = ask(
        ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={label}",
         "--format=JobID,State,ExitCode"], env,
    )  # fmt: skip
    records = []
    for line in output.splitlines():
        try:
            job, state, codes = line.split("|")
            # "CANCELLED by 1000"
            records.append(Ended(job, state.partition(" ")[0], _exit_code(codes)))
        except ValueError:
            raise NoAnswerError(f"sacct: no answer that can be read: {line[:200]!r}") from None
    return records


def largest_memory(label: str, env: Mapping[str, str]) -> float:
    """Return the most bytes of memory that a task of a job has used; 0 if that is not recorded.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        env: environment of the command.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    output = ask(
        ["sacct", "--noheader", "--parsable2", "--noconvert", f"--jobs={label}", "--format=MaxRSS"],
        env,
    )
    sizes = filter(None, map(_SIZE.match, output.split()))
    return max(
        (float(size[1]) * 1024 ** " KMGT".index(size[2] or " ") for size in sizes), default=0
    )


def accounts(user: str, env: Mapping[str, str]) -> list[str]:
    """Return the accounts that a user may use: the default one first, the others sorted.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    names = _show(["associations", f"user={user}", "format=Account"], env)
    default = _show(["user", user, "format=DefaultAccount"], env)
    return sorted(set(names), key=lambda name: (name not in default, name))


def qualities(user: str, env: Mapping[str, str]) -> list[str]:
    """Return the qualities of service (QOS) that a user may ask for, sorted.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    lists = _show(["associations", f"user={user}", "format=QOS"], env)
    return sorted({name for names in lists for name in names.split(",")})


def _show(words: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the lines of `sacctmgr show` that are not empty."""
    output = ask(["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", *words], env)
    return [line.strip() for line in output.splitlines() if line.strip()]


# Partitions and nodes of a cluster, and which nodes a job can do without.

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_EXCLUDED = re.compile(r"\bExcNodeList=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
# States of sinfo(1) in which a node runs jobs, or will.
_USABLE = re.compile(r"(alloc|mix|idle|comp|plan|resv|reserved)", re.ASCII)
_COMMON_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of the cluster.

    Attributes:
        name: name of the partition, without the star of the default partition.
        default: whether jobs without a partition run here.
        limit: longest run time in Slurm's format, or "infinite".
        nodes: number of nodes.
        gpus: GPUs of each node, such as gpu:a100:4; empty for none.
        up: whether jobs may run here.
    """

    name: str
    default: bool
    limit: str
    nodes: str
    gpus: str
    up: bool


def partitions(env: Mapping[str, str]) -> list[Partition]:
    """Return all partitions visible to the user; one entry for each kind of node in a partition.

    Raises:
        NoAnswerError: Slurm is absent or did not answer.
    """
    output = ask(["sinfo", "--noheader", "--format=%P|%l|%D|%a|%G"], env)
    rows = []
    for line in output.splitlines():
        columns = line.split("|", 4)
        if len(columns) != 5:
            raise NoAnswerError(f"sinfo: no answer that can be read: {line[:200]!r}")
        name, limit, nodes, up, gres = columns
        gpus = ",".join(
            entry.partition("(")[0] for entry in gres.split(",") if entry.startswith("gpu")
        )
        rows.append(Partition(name.rstrip("*"), name.endswith("*"), limit, nodes, gpus, up == "up"))
    return rows


def slurmd_address(node: str, env: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port at which slurmd of a node listens.

    Args:
        node: name of the node.
        env: environment of the commands.

    Raises:
        NoAnswerError: Slurm does not answer, or does not know the node.
    """
    shown = ask(["scontrol", "show", "node", "--oneliner", node], env)
    address = _ADDRESS.search(shown)
    # Only a node with a port of its own shows it.
    port = _PORT.search(shown) or _COMMON_PORT.search(ask(["scontrol", "show", "config"], env))
    if address is None or port is None:
        raise NoAnswerError(f"scontrol: no answer that can be read: {shown[:200]!r}")
    return address[1], int(port[1])


def excludable(
    hosts: Sequence[str], needed: int, partition: str, env: Mapping[str, str]
) -> list[str]:
    """Return the hosts that a job can leave out: one, or a tenth of its partition if that is more.

    Args:
        hosts: names of hosts, the most important ones first.
        needed: number of hosts of the job, which have to be left.
        partition: partition of the job; empty for the default one.
        env: environment of the command.

    Raises:
        NoAnswerError: Slurm does not answer.
    """
    argv = ["sinfo", "--noheader", "--Node", "--format=%P %N %t"]
    rows = [row.split() for row in ask(argv, env).splitlines()]
    states = {
        row[1]: row[2]
        for row in rows
        if len(row) == 3
        and (row[0].rstrip("*") == partition or (not partition and row[0].endswith("*")))
    }
    left_out = [host for host in hosts if host in states][: max(1, len(states) // 10)]
    usable = {node for node, state in states.items() if _USABLE.match(state)}
    while left_out and len(usable.difference(left_out)) < needed:
        left_out.pop()
    return left_out


def exclude(label: str, hosts: Sequence[str], env: Mapping[str, str]) -> None:
    """Add hosts to those that a waiting job leaves out.

    Raises:
        NoAnswerError: the job does not wait, or Slurm does not answer.
    """
    shown = ask(["scontrol", "show", "job", "--oneliner", label], env)
    found = _EXCLUDED.search(shown)
    before = [found[1]] if found and found[1] != "(null)" else []
    names = ",".join([*before, compress(hosts)])
    ask(["scontrol", "update", f"JobId={label}", f"ExcNodeList={names}"], env)


# Parts of a heterogeneous job, each with its own hosts and number of tasks. Source: "Heterogeneous
# Job Support" of Slurm's documentation; captured environments.

# Lists and counts that srun joins for the tasks of a step, and sbatch gives for each part only.
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
_SUMS = ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS")


def hosts_of_parts(env: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each part of the job; empty for a job without parts.

    Args:
        env: environment of the batch script or of the allocation's shell.
    """
    return [expand(text) for text in _values(env, "SLURM_JOB_NODELIST")]


def ids_of_parts(env: Mapping[str, str]) -> list[str]:
    """Return the job ids of the parts; of a job without parts, its id."""
    return _values(env, "SLURM_JOB_ID") or [env["SLURM_JOB_ID"]]


def of_all_parts(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the hosts and tasks of all parts as those of the job."""
    whole = dict(env)
    for name in _LISTS:
        if values := _values(env, name):
            whole[name] = ",".join(values)
    for name in _SUMS:
        if values := _values(env, name):
            whole[name] = str(sum(map(int, values)))
    return whole


def _values(env: Mapping[str, str], name: str) -> list[str]:
    """Return the values of a variable in all parts; empty if a part lacks it.

    A job that was submitted in a heterogeneous one has inherited the variables of its parts.
    """
    if env.get("SLURM_JOB_ID_HET_GROUP_0") != env.get("SLURM_JOB_ID"):
        return []
    count = number(env, "SLURM_HET_SIZE") or 0
    values = [env.get(f"{name}_HET_GROUP_{part}", "") for part in range(count)]
    return values if all(values) else []
