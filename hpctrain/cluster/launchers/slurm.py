"""The launcher srun, which starts the tasks of a Slurm step.

The shells of sbatch and salloc are not tasks. They have the job's variables, also SLURM_PROCID=0,
but not the id of a step that srun started. The shell of `srun --pty` is a task, but what a person
starts in it is not: the shells of the other tasks have no terminal, and end at once.

Source: OUTPUT ENVIRONMENT VARIABLES in srun(1) and sbatch(1), Slurm 22.05.
"""

import itertools
import os
import re
from collections.abc import Sequence

from hpctrain.cluster.hostlist import compress
from hpctrain.cluster.launchers.ancestors import IN_A_SHELL, SLURM_STEP
from hpctrain.cluster.launchers.base import Claim, Claims, Environ, Launcher, host_list
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError

__all__ = ["SlurmStep", "expand_counts"]

# Slurm reserves step ids from here on: batch script, external, interactive (slurm.h, 22.05).
_FIRST_OWN_STEP = 0xFFFFFFF0
_STEP = re.compile(r"[0-9]{1,10}\Z")
# Slurm allows at most 65,536 nodes in a list, so the number of digits is limited.
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,5})\))?\Z")
# Distributions that put rank 0 on the first host of the list; "arbitrary" uses a file.
_FIRST_HOST_FIRST = ("block", "cyclic", "plane", "unknown", "")

# Variables with the same value in a job of one step.
_HOSTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NUM_NODES")
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")


class SlurmStep(Launcher):
    """The variables of a step. A step can be smaller than its job, whose variables come second."""

    name = "slurm"
    marks = ("SLURM_STEP_ID",)
    recognised_by = "SLURM_STEP_ID of a step whose task this is"
    reason = "before env://: batch scripts export RANK and MASTER_ADDR on top of srun"
    variables = {
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
        "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    }
    composed = {
        "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
        "hosts": "SLURM_STEP_NODELIST",
    }
    knows_rank_0 = True
    starts = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")

    def matches(self, env: Environ) -> bool:
        """Check whether this is a task of a step with a numeric id.

        A job submitted from inside a step inherits the variables of that step, so its batch shell
        looks like a task. The title of slurmstepd, if visible, shows the difference.
        """
        step = env.get("SLURM_STEP_ID", "")
        if not _STEP.match(step) or int(step) >= _FIRST_OWN_STEP or env.get(IN_A_SHELL):
            return False
        job, _, title = env.get(SLURM_STEP, "").partition(".")
        # The slurmstepd of another job is ignored, as under `hpctrain run --as slurm`.
        return not title or job != env.get("SLURM_JOB_ID") or bool(_STEP.match(title))

    def claims(self, env: Environ) -> Claims:
        """Return the values of the variables, the hosts, and the number of tasks on this host."""
        claims = super().claims(env)
        hosts = host_list(env, "SLURM_STEP_NODELIST")
        if hosts:
            claims["hosts"] = Claim(hosts, "SLURM_STEP_NODELIST")
            _check_hosts(env, hosts)
        counts = env.get("SLURM_STEP_TASKS_PER_NODE")
        if counts and "node_rank" in claims:
            local = _tasks_here(counts, claims)
            claims["local_world_size"] = Claim(local, "SLURM_STEP_TASKS_PER_NODE")
        return claims

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return the address that the batch script exported, else the first host of the step."""
        address, port = super().main(env, world)
        if address is None and world.hosts and _first_host_first(env, world):
            address = world.hosts[0]
        return address, port

    def others(self, env: Environ, world: World) -> tuple[str, ...]:
        """Return all hosts of the step if rank 0 may be on any of them; else none."""
        return () if _first_host_first(env, world) else world.hosts or ()

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that srun sets in such a job; derive the job id from `start`."""
        here = world.node_rank or 0
        before = sum(tasks_per_node[:here])
        values = {
            ("SLURM_JOB_ID", "SLURM_JOBID"): start % 10**8,
            ("SLURM_JOB_NAME",): "python",
            ("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION"): "simulated",
            ("SLURM_JOB_USER",): os.environ.get("USER", ""),
            ("SLURM_JOB_UID",): os.getuid(),
            ("SLURM_JOB_GID",): os.getgid(),
            ("SLURM_SUBMIT_DIR",): os.getcwd(),
            ("SLURM_SUBMIT_HOST",): os.uname().nodename,
            ("SLURM_LAUNCH_NODE_IPADDR",): "127.0.0.1",
            ("SLURM_PRIO_PROCESS",): 0,
            ("SLURM_UMASK",): "0022",
            ("SLURM_TOPOLOGY_ADDR",): world.hosts[here] if world.hosts else "localhost",
            ("SLURM_TOPOLOGY_ADDR_PATTERN",): "node",
            _HOSTS: compress(world.hosts or ()),
            _NODES: world.num_nodes,
            _TASKS: world.world_size,
            _COUNTS: _compress_counts(tasks_per_node),
            ("SLURM_CPUS_ON_NODE",): tasks_per_node[here],
            ("SLURMD_NODENAME",): world.hosts[here] if world.hosts else "localhost",
            ("SLURM_GTIDS",): ",".join(str(before + n) for n in range(tasks_per_node[here])),
            ("SLURM_STEP_ID", "SLURM_STEPID"): 0,
            ("SLURM_DISTRIBUTION",): "block",
            ("SLURM_PROCID",): world.rank,
            ("SLURM_LOCALID",): world.local_rank,
            ("SLURM_NODEID",): world.node_rank,
        }
        if len(set(tasks_per_node)) == 1:
            values["SLURM_NTASKS_PER_NODE",] = tasks_per_node[0]
        return {name: str(value) for names, value in values.items() for name in names}


def _first_host_first(env: Environ, world: World) -> bool:
    """Check whether rank 0 is on the first host of the step."""
    distribution = env.get("SLURM_DISTRIBUTION", "").split(":")[0].split(",")[0]
    return len(world.hosts or ()) == 1 or distribution in _FIRST_HOST_FIRST


def _check_hosts(env: Environ, hosts: Sequence[str]) -> None:
    """Refuse the variables of another job's step: see `SlurmStep.matches`."""
    job = host_list(env, "SLURM_JOB_NODELIST")
    # A component of a heterogeneous job may list only its own hosts.
    if not job or "SLURM_HET_SIZE" in env or set(hosts) <= set(job):
        return
    raise ContradictionError("HT104.step-of-another-job", env=env)


def expand_counts(text: str, name: str) -> list[int]:
    """Expand Slurm's tasks per node in a variable: `2(x3),1` becomes 2, 2, 2, 1.

    Raises:
        ContradictionError: the text has another format.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = _COUNT.match(piece)
        if match is None:
            raise ContradictionError("HT103.tasks-per-node-unreadable", name=name, value=text[:200])
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _compress_counts(counts: Sequence[int]) -> str:
    runs = ((count, len(list(run))) for count, run in itertools.groupby(counts))
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _tasks_here(tasks_per_node: str, claims: Claims) -> int:
    """Return the number of tasks on this host; check it against the other variables."""
    counts = expand_counts(tasks_per_node, "SLURM_STEP_TASKS_PER_NODE")
    node: int = claims["node_rank"].value
    if not 0 <= node < len(counts):
        key, nodes = "HT101.node-id-out-of-range", len(counts)
        raise ContradictionError(key, node_id=node, tasks_per_node=tasks_per_node, nodes=nodes)
    size = claims.get("world_size")
    tasks = sum(counts)
    if size is not None and tasks != size.value:
        key = "HT101.task-counts-differ"
        raise ContradictionError(key, size=size, tasks_per_node=tasks_per_node, tasks=tasks)
    return counts[node]
