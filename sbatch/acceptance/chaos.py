"""Let faults happen in one of your running jobs, at random times and to random ranks.

    python sbatch/acceptance/chaos.py JOB [--kinds KIND,…] [--count 10] [--mean 60] [--seed 0]

The same seed gives the same faults. Those of a rank are signals to its process, which a step of the
job sends on the rank's node: this program again, as `chaos.py --send SIGNAL SEED`. The others are
commands of Slurm. None needs a right that the owner of the job does not have.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import commands, env_vars, slurm, system
from hpctrain.cluster.hostlist import expand

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
# What the sender is asked for on the node of a rank.
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
# Not the rank: those that have waited can get another number.
_RANK = "HPCTRAIN_LOCAL_RANK"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come.

    Attributes:
        delay: seconds from the fault before, or from the start.
        kind: one of `KINDS`.
        seed: random number that decides about node and rank.
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


def run(label: str, faults: Iterator[Fault], env: Mapping[str, str]) -> int:
    """Let faults happen in a job, with a line for each, until the job has ended.

    Returns:
        The number of faults that happened.
    """
    happened = 0
    for fault in faults:
        time.sleep(fault.delay)
        deadline = time.monotonic() + _SECONDS_TO_GO_ON
        while (done := _happen(label, fault, env)) == "":
            if time.monotonic() > deadline:
                sys.exit(f"job {label} has had no ranks of hpctrain run for ten minutes")
            time.sleep(_SECONDS_BETWEEN_TRIES)
        if done is None:
            break
        happened += 1
        print(f"{time.strftime('%H:%M:%S')}  {fault.kind}: {done}", flush=True)
    return happened


def _happen(label: str, fault: Fault, env: Mapping[str, str]) -> str | None:
    """Let a fault happen; return what was hurt, "" if nothing is there yet, None after the end."""
    try:
        listed = slurm.jobs(env, [label])
    except slurm.NoAnswerError as error:
        sys.exit(f"Slurm does not answer: {error}")
    if not listed or not listed[0].active:
        return None
    job = listed[0]
    if job.state != "RUNNING":
        return ""
    try:
        if fault.kind == "requeue":
            slurm.requeue(label, env)
        elif fault.kind == "usr2":
            slurm.signal_batch(label, "USR2", env)
        else:
            host = random.Random(fault.seed).choice(expand(job.hosts))
            found = _hurt(job.number, fault, host, env)
            if fault.kind != "step" or not found:
                return found
            # Not the oldest step: Slurm keeps those of a lost node in its list for a while.
            slurm.cancel([f"{job.number}.{found}"], env)
            return f"{job.number}.{found}"
    except slurm.NoAnswerError:
        return ""
    return label


def _hurt(number: str, fault: Fault, host: str, env: Mapping[str, str]) -> str:
    """Send a signal to a rank on a node, or find its step; return the answer, "" without a rank."""
    step = ["srun", "--quiet", "--overlap", f"--jobid={number}", f"--nodelist={host}"]
    step += ["--nodes=1", "--ntasks=1", "--mpi=none", sys.executable, os.path.abspath(__file__)]
    try:
        words = ["--send", _OF_A_RANK[fault.kind], str(fault.seed)]
        done = commands.run([*step, *words], _SECONDS_FOR_A_STEP, env)
    except commands.NoAnswerError:
        return ""
    return done.stdout.strip()


def send(kind: str, seed: int) -> None:
    """Send a signal to a rank of this job on this node and print which; for `step`, its step."""
    found = ranks(os.environ)
    if not found:
        return
    rank, pid = random.Random(seed).choice(sorted(found.items()))
    if kind == "step":
        print((system.environment(pid) or {}).get("SLURM_STEP_ID", ""))
        return
    os.kill(pid, signal.Signals[kind])
    print(f"local rank {rank}, process {pid}")


def ranks(env: Mapping[str, str]) -> dict[int, int]:
    """Return the processes of the ranks that train in a job on this node, by local rank.

    Those of the next attempt, which wait, are omitted, and the child processes of ranks.

    Args:
        env: environment of a task of the job on this node.
    """
    found: dict[int, dict[str, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        environ = system.environment(int(path.name)) or {}
        same_job = environ.get("SLURM_JOB_ID") == env.get("SLURM_JOB_ID")
        if same_job and environ.get(_RANK, "").isdecimal():
            found[int(path.name)] = environ
    attempts = {pid: environ.get(env_vars.START, "") for pid, environ in found.items()}
    first = min(attempts.values(), key=_number, default="")
    processes = {}
    for pid, environ in found.items():
        with contextlib.suppress(OSError):  # it has just ended
            if attempts[pid] == first and system.stat(pid).parent not in found:
                processes[int(environ[_RANK])] = pid
    return processes


def _number(start: str) -> int:
    """Return the number of an attempt from its name."""
    number = start.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _kinds(text: str) -> list[str]:
    if not set(kinds := text.split(",")) <= set(KINDS):
        raise ValueError
    return kinds


def _above_zero(text: str) -> float:
    if not 0 < (value := float(text)) < 1e6:
        raise ValueError
    return value


def main(words: Sequence[str] | None = None) -> None:
    """Let faults happen as the command line says."""
    parser = argparse.ArgumentParser(
        description="Lets faults happen in one of your running jobs, at random times and to random "
        "ranks. The same seed gives the same faults. Kinds: "
        + "; ".join(f"{kind}: {about}" for kind, about in KINDS.items())
    )
    parser.add_argument("job", nargs="?", help="number of the job, as squeue shows it")
    parser.add_argument("--kinds", type=_kinds, default="kill,segv,abort", help="(%(default)s)")
    parser.add_argument("--count", type=int, default=10, help="number of faults (%(default)s)")
    parser.add_argument(
        "--mean", type=_above_zero, default=60.0, help="mean seconds between two faults (60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--send", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.send:
        send(arguments.send[0], int(arguments.send[1]))
        return
    if arguments.job is None:
        parser.error("the number of the job is missing")
    faults = sequence(arguments.kinds, arguments.count, arguments.mean, arguments.seed)
    happened = run(arguments.job, faults, os.environ)
    if happened < arguments.count:
        print(f"the job has ended after {happened} of {arguments.count} faults")


if __name__ == "__main__":
    main()
