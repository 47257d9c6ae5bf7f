"""Commands that submit a script, and cancel or requeue a job."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.commands import LateAnswerError, NoAnswerError, run
from hpctrain.cluster.slurm.asking import ask

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
