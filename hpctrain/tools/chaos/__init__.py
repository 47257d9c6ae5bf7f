"""Faults in a running job of Slurm, at random times from a seed.

The faults of a rank are signals to its process, which a step of the job sends on the rank's host.
The others are commands of Slurm. None needs a right that the owner of the job does not have.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster import commands, slurm
from hpctrain.cluster.hostlist import expand
from hpctrain.errors import StartError

__all__ = ["KINDS", "Fault", "run", "sequence"]

#: Kinds of faults: what each does.
KINDS = {
    "kill": "kill -9 of a rank, as the kernel does where memory is short",
    "segv": "SIGSEGV to a rank, as after a wrong access in C",
    "abort": "SIGABRT to a rank, as when a library gives up",
    "stop": "SIGSTOP to a rank: it hangs, and the watchdog has to end it",
    "step": "scancel of the step in which the ranks run",
    "usr2": "the signal with which Slurm announces a preemption, to the batch script",
    "requeue": "scontrol requeue of the job, as a preemption without a warning",
}
# What the sender is asked for on the host of a rank.
_OF_A_RANK = {
    "kill": "SIGKILL",
    "segv": "SIGSEGV",
    "abort": "SIGABRT",
    "stop": "SIGSTOP",
    "step": "step",
}
_SECONDS_FOR_A_STEP = 60.0
_SECONDS_BETWEEN_TRIES = 1.0
_SECONDS_TO_GO_ON = 600.0  # for a job that waits in the queue or starts its ranks again


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come.

    Attributes:
        delay: seconds from the fault before, or from the start.
        kind: one of `KINDS`.
        seed: random number that decides about host and rank.
    """

    delay: float
    kind: str
    seed: int


def sequence(kinds: Sequence[str], count: int, mean: float, seed: int) -> Iterator[Fault]:
    """Yield faults; the same arguments give the same ones.

    Args:
        kinds: kinds to choose from; a kind that is there twice is chosen twice as often.
        count: number of faults.
        mean: mean distance in seconds. The distances have an exponential distribution, as those of
            independent faults have.
        seed: seed of the random numbers.
    """
    draw = random.Random(seed)
    for _ in range(count):
        yield Fault(draw.expovariate(1 / mean), draw.choice(list(kinds)), draw.randrange(1 << 32))


def run(
    label: str,
    faults: Iterator[Fault],
    env: Mapping[str, str],
    report: Callable[[str], None],
) -> int:
    """Let faults happen in a job until there are no more of them, or the job has ended.

    Args:
        label: label of the job.
        faults: faults, as `sequence` returns them.
        env: environment of this process.
        report: function that is called with a line for each fault.

    Returns:
        The number of faults that happened.

    Raises:
        StartError: Slurm does not know the job, or the job has no ranks for ten minutes.
    """
    happened = 0
    for fault in faults:
        time.sleep(fault.delay)
        deadline = time.monotonic() + _SECONDS_TO_GO_ON
        while (done := _happen(label, fault, env)) == "":
            if time.monotonic() > deadline:
                raise StartError(
                    "HT827",
                    f"job {label} has had no ranks for {_SECONDS_TO_GO_ON:.0f} s",
                    "a job whose ranks hpctrain run starts",
                    f"hpctrain status {label}",
                )
            time.sleep(_SECONDS_BETWEEN_TRIES)
        if done is None:
            break
        happened += 1
        report(f"{fault.kind}: {done}")
    return happened


def _happen(label: str, fault: Fault, env: Mapping[str, str]) -> str | None:
    """Let a fault happen; return what was hurt, "" if nothing is there yet, None after the end."""
    try:
        listed = slurm.jobs(env, [label])
    except slurm.NoAnswerError as error:
        raise StartError(
            "HT827", str(error), "a job that runs, and a Slurm that answers", "squeue --me"
        ) from None
    if not listed or not listed[0].active:
        return None
    if listed[0].state != "RUNNING":
        return ""
    number = listed[0].number
    try:
        if fault.kind not in _OF_A_RANK:
            return _command(label, fault.kind, env)
        host = random.Random(fault.seed).choice(expand(listed[0].hosts))
        found = _hurt(number, fault, host, env)
        if fault.kind != "step" or not found:
            return found
        # Not the oldest step: Slurm keeps those of a lost host in its list for a while.
        slurm.cancel([f"{number}.{found}"], env)
        return f"{number}.{found}"
    except slurm.NoAnswerError:
        return ""


def _command(label: str, kind: str, env: Mapping[str, str]) -> str:
    """Hurt the job by a command of Slurm.

    Raises:
        NoAnswerError: Slurm does not answer, or refuses it.
    """
    if kind == "requeue":
        slurm.requeue(label, env)
    else:
        slurm.signal_batch(label, "USR2", env)
    return label


def _hurt(number: str, fault: Fault, host: str, env: Mapping[str, str]) -> str:
    """Send a signal to a rank on a host, or find its step; return the answer, "" without a rank."""
    module = ["-m", "hpctrain.tools.chaos.sender", _OF_A_RANK[fault.kind], str(fault.seed)]
    step = ["srun", "--quiet", "--overlap", f"--jobid={number}", f"--nodelist={host}"]
    step += ["--nodes=1", "--ntasks=1", "--mpi=none", sys.executable, *module]
    try:
        done = commands.run(step, _SECONDS_FOR_A_STEP, env)
    except commands.NoAnswerError:
        return ""
    return done.stdout.strip()
