"""Checks of a start whose launcher is clear: for idle hosts and for processes that are no rank.

Each check returns an error or None. A session raises the error when it opens, and `hpctrain
explain` shows it as a warning. The user allows such a start with `$HPCTRAIN_LAUNCHER`, set only
for the command: an export would also apply to a later srun, whose tasks would each train alone.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from hpctrain.cluster.job import Allocation
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.launchers.ancestors import IN_A_SHELL, LAUNCHING, SLURM_STEP, Process
from hpctrain.cluster.launchers.base import Claims, Environ, RendezvousPoint, host_list
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError

__all__ = ["child", "dropped", "elsewhere", "idle", "nameless", "repeated", "reset", "stale"]


def idle(
    world: World, job: Allocation | None, in_step: bool, process: Process
) -> UsageError | None:
    """Return an error if tasks of the job are idle, or if several tasks train separately.

    Args:
        world: place of this process among the ranks.
        job: job of the scheduler.
        in_step: whether a task of a Slurm step started the launcher.
        process: facts about this process, with its command line.
    """
    if world.launcher == "slurm" or job is None or not job.tasks:
        return None
    agents = world.num_nodes or 1
    if in_step and world.launcher == "torchrun" and agents < job.tasks:
        return UsageError("HT111.torchrun-in-each-task", job=job, world=world, agents=agents)
    if job.tasks <= world.world_size:
        return None
    if world.launcher != "none":
        return UsageError("HT110.too-few-ranks", world=world, job=job)
    key, shell = "HT110.trains-alone", process.facts().get(IN_A_SHELL)
    command = shlex.join(process.arguments) or "COMMAND"
    if any("ipykernel" in argument for argument in process.arguments):
        key = "HT110.notebook-trains-alone"
    elif shell:
        key, command = "HT110.in-a-shell-of-srun", _program(process)
    return UsageError(key, idle=job.tasks - 1, job=job, command=command, shell=shell)


def elsewhere(
    world: World, job: Allocation | None, env: Environ, process: Process
) -> UsageError | None:
    """Return an error if this host does not belong to the job: the shell of salloc is often there.

    Args:
        world, job, process: as for `idle`.
        env: environment of this process. slurmd sets SLURMD_NODENAME on all hosts of a job.
    """
    # A person who lets `hpctrain run` start ranks there has set $HPCTRAIN_LAUNCHER for it.
    if world.launcher == "hpctrain" or job is None or env.get("SLURMD_NODENAME"):
        return None
    hosts = {host.partition(".")[0] for host in host_list(env, "SLURM_JOB_NODELIST")}
    if not hosts or not process.host or process.host.partition(".")[0] in hosts:
        return None
    command = _program(process)
    return UsageError(
        "HT118.outside-the-job", process=process, job=job, env=env, command=command, world=world
    )


def nameless(world: World, point: RendezvousPoint) -> UsageError | None:
    """Return an error for a manual start without a port, which could mix with another start."""
    if world.launcher != "env" or world.world_size == 1 or point.port:
        return None
    return UsageError("HT102.no-port", world=world)


def reset(world: World, env: Environ, process: Process) -> UsageError | None:
    """Return an error for a worker of Horovod's elastic mode, which changes ranks at run time.

    hpctrain's decisions by rank would then be wrong, and a worker that exits with 0 ends the job.
    Source: create_run_env_vars in horovod/runner/gloo_run.py and horovod/common/elastic.py,
    Horovod 0.28.1.
    """
    value = env.get("HOROVOD_ELASTIC", "")
    if world.launcher != "horovodrun" or value in ("", "0"):
        return None
    command = _program(process, "SCRIPT --elastic --global-batch N")
    return UsageError("HT112.elastic-horovodrun", value=value, command=command)


def _program(process: Process, otherwise: str = "SCRIPT") -> str:
    """Return the command line of a process as `hpctrain run` takes it."""
    words = process.arguments[1:]
    if words and words[0].startswith("-") and words[0] != "-m":  # an option of Python
        words = ("--", *process.arguments)
    return shlex.join(words) or otherwise


def dropped(world: World, job: Allocation | None, process: Process) -> UsageError | None:
    """Return an error if a launcher started this process, but its variables were lost."""
    ancestor = process.launched_by
    if world.launcher != "none" or ancestor is None or (ancestor.launcher == "slurm" and job):
        return None
    if process.facts().get(SLURM_STEP, "").endswith(".batch"):
        # The batch script is one process: its first environment has the number of tasks.
        batch_job = detect_job(ancestor.started)
        if batch_job is None or not batch_job.tasks or batch_job.tasks == 1:
            return None
    return UsageError("HT108.environment-dropped", ancestor=ancestor)


def stale(name: str, others: Sequence[str], process: Process) -> UsageError | None:
    """Return an error if the variables are older than the nearest launcher among the ancestors.

    Args:
        name: launcher whose variables would be used.
        others: other launchers whose variables are set.
        process: facts about this process, with its ancestors.
    """
    ancestor = process.launched_by
    # A launcher that is never visible among the ancestors may run inside the one that is.
    if ancestor is None or ancestor.launcher not in others or name not in LAUNCHING.values():
        return None
    return UsageError("HT104.variables-of-outer-launcher", name=name, ancestor=ancestor)


def repeated(process: Process) -> UsageError | None:
    """Return an error for a process in which multiprocessing imports the parent's script."""
    if not process.repeats:
        return None
    return UsageError("HT109.script-runs-again", script=os.path.basename(sys.argv[0]))


def child(claims: Claims, env: Environ, process: Process) -> UsageError | None:
    """Return an error for a multiprocessing child with its parent's rank, or with no rank."""
    parent_env = process.inherited
    rank, size = claims["rank"], claims["world_size"]
    if parent_env is None or any(
        env.get(c.source) != parent_env.get(c.source) for c in (rank, size)
    ):
        return None
    return UsageError("HT109.rank-of-the-parent", rank=rank)
