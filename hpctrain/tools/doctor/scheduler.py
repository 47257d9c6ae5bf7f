"""Checks of Slurm and of the job that this process runs in."""

import shutil
import time
from collections.abc import Mapping

from hpctrain.cluster.job import Allocation
from hpctrain.cluster.texts import printable
from hpctrain.cluster.world import World
from hpctrain.tools.doctor.findings import OK, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import ask

__all__ = ["examine", "judge_job", "judge_slurm"]


def examine(job: Allocation | None, env: Mapping[str, str], world: World) -> list[Finding]:
    """Return the findings about Slurm and the job.

    Args:
        job: allocation of the scheduler; None outside of a job.
        env: environment variables, for the memory of the job.
        world: world of this process. Only rank 0 queries the controller for the time left, because
            the answer is the same for all ranks.
    """
    found = []
    if world.local_rank == 0:
        installed = shutil.which("srun") is not None
        found.append(judge_slurm(installed, ask(["srun", "--version"]) if installed else None))
    left = None
    if job is not None and world.rank == 0 and job.scheduler == "slurm":
        left = ask(["squeue", "--noheader", "--jobs", job.job_id, "--format", "%L"])
    return [*found, judge_job(job, env, time.time(), left)]


def judge_slurm(installed: bool, answer: tuple[int, str] | None) -> Finding:
    """Return a finding with Slurm's version.

    Args:
        installed: whether srun is installed.
        answer: exit code and output of `srun --version`; None without an answer in time.
    """
    if not installed:
        return Finding("Slurm", OK, "not installed")
    if answer is not None and "configuration source" in answer[1]:
        return Finding(
            "Slurm",
            WARNING,
            "installed, but no slurm.conf is found",
            ("export SLURM_CONF=/PATH/slurm.conf, if this machine is in a cluster",),
        )
    if answer is None or answer[0] != 0:
        found = printable(answer[1].partition("\n")[0])[:200] if answer else "no answer"
        fix = "scontrol ping, which shows whether the controller responds"
        return Finding("Slurm", WARNING, f"srun --version: {found}", (fix,))
    return Finding("Slurm", OK, printable(answer[1]))


def judge_job(
    job: Allocation | None,
    env: Mapping[str, str],
    now: float,
    left: tuple[int, str] | None = None,
) -> Finding:
    """Return a finding with the resources of the job.

    Args:
        job: allocation of the scheduler; None outside of a job.
        env: environment variables, for the memory of the job.
        now: current time in seconds since the epoch.
        left: exit code and output of squeue, for a job whose variables lack its end time.
    """
    if job is None:
        return Finding("job", OK, "none")
    parts = [f"{job.scheduler} {printable(job.label)}", f"restart {job.restart_count}"]
    if job.end_time is not None:
        seconds = max(0.0, job.end_time - now)
        parts.append(f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min left")
    elif left is not None and left[0] == 0 and left[1].strip():
        parts.append(f"{printable(left[1])} left")
    if job.tasks is not None:
        parts.append(f"{job.tasks} task{'s' if job.tasks != 1 else ''}")
    if job.gpus is not None:
        parts.append(f"{job.gpus} GPU{'s' if job.gpus != 1 else ''} on this host")
    for name, text in (("SLURM_MEM_PER_NODE", "a node"), ("SLURM_MEM_PER_CPU", "a core")):
        if env.get(name, "").isdecimal():
            parts.append(f"{env[name]} MiB for {text}")
    return Finding("job", OK, ", ".join(parts))
