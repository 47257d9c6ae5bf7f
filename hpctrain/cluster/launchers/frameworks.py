"""Launchers of training programs, variables that a person sets, and a process without a launcher.

Most of each class is data. Sources, in the order of the classes: "Environment Variables" in
torch.distributed.run's documentation; horovod/runner/gloo_run.py, Horovod 0.28.1;
submitit/local/local.py, submitit 1.5.4; "Environment variable initialization" in
torch.distributed's documentation, and torch/distributed/launch.py.
"""

from collections.abc import Sequence

from hpctrain.cluster.env_vars import START
from hpctrain.cluster.launchers.ancestors import LOCAL_RANK_ARGUMENT
from hpctrain.cluster.launchers.base import (
    MPI,
    SCHEDULERS,
    Claim,
    Claims,
    Environ,
    Launcher,
    LauncherStore,
    port_in,
)
from hpctrain.cluster.world import World

__all__ = ["EnvLauncher", "Horovodrun", "HpctrainRun", "NoLauncher", "SubmititLocal", "Torchrun"]


class HpctrainRun(Launcher):
    """The variables that hpctrain's own launchers set, `hpctrain run` and `hpctrain.spawn`."""

    name = "hpctrain"
    reason = "first: it removes the variables of other launchers, so it is the closest to the ranks"
    marks = ("HPCTRAIN_RANK", "HPCTRAIN_WORLD_SIZE")
    # The variables of the Slurm job stay in the environment.
    inside = frozenset({"slurm"})
    starts = (START,)
    variables = {
        "rank": ("HPCTRAIN_RANK",),
        "world_size": ("HPCTRAIN_WORLD_SIZE",),
        "local_rank": ("HPCTRAIN_LOCAL_RANK",),
        "local_world_size": ("HPCTRAIN_LOCAL_WORLD_SIZE",),
        "node_rank": ("HPCTRAIN_NODE_RANK",),
        "num_nodes": ("HPCTRAIN_NUM_NODES",),
    }
    composed = {"hosts": "HPCTRAIN_HOSTS"}

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return nothing: MASTER_PORT is that of a store for programs without a session."""
        del env, world
        return None, None

    def claims(self, env: Environ) -> Claims:
        """Return the values of the variables, and the hosts if they are set."""
        claims = super().claims(env)
        hosts = env.get("HPCTRAIN_HOSTS")
        if hosts:
            claims["hosts"] = Claim(tuple(hosts.split(",")), "HPCTRAIN_HOSTS")
        return claims

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return variables for all fields of World; the hosts only if they are known."""
        hosts = {"HPCTRAIN_HOSTS": ",".join(world.hosts)} if world.hosts else {}
        return super().environ(world, tasks_per_node, start) | hosts


class Torchrun(Launcher):
    """The variables that an agent of torch.distributed.elastic sets for the ranks of its host."""

    name = "torchrun"
    reason = "before all others: they start agents, and the agents start the ranks"
    # Only an agent sets a run id.
    marks = ("TORCHELASTIC_RUN_ID",)
    inside = SCHEDULERS | MPI
    variables = {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
    }
    # The run id alone is not enough: it is "none" for every static rendezvous.
    starts = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    knows_rank_0 = True

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, the host of rank 0, without MASTER_PORT, which the agent uses."""
        del world
        return env.get("MASTER_ADDR") or None, None

    def store(self, env: Environ) -> LauncherStore | None:
        """Return the store of the first agent if the ranks may use it, else None."""
        port = port_in(env, "MASTER_PORT")
        if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not env.get("MASTER_ADDR"):
            return None
        return LauncherStore(self.name, env["MASTER_ADDR"], port) if port else None

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that an agent sets; derive the run id from `start`."""
        return {
            **super().environ(world, tasks_per_node, start),
            "TORCHELASTIC_RUN_ID": f"hpctrain-{start}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # There is no agent with a store, so rank 0 has to serve one.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(world.rank),
            "ROLE_WORLD_SIZE": str(world.world_size),
            "MASTER_ADDR": world.hosts[0] if world.hosts else "127.0.0.1",
            "MASTER_PORT": str(20000 + start % 12000),
        }


class Horovodrun(Launcher):
    """The variables that horovodrun over gloo gives to each process over ssh.

    `horovodrun --mpi` uses mpirun and is read as Open MPI.

    HOROVOD_CROSS_RANK and _SIZE count only the hosts that have a process with this local rank.
    These are not all hosts if the hosts have different numbers of ranks.
    """

    name = "horovodrun"
    reason = "before Slurm and MPI: it runs inside of their jobs, and starts the ranks itself"
    marks = ("HOROVOD_RANK", "HOROVOD_SIZE")
    inside = SCHEDULERS
    variables = {
        "rank": ("HOROVOD_RANK",),
        "world_size": ("HOROVOD_SIZE",),
        "local_rank": ("HOROVOD_LOCAL_RANK",),
        "local_world_size": ("HOROVOD_LOCAL_SIZE",),
    }
    starts = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")

    def store(self, env: Environ) -> LauncherStore | None:
        """Return horovodrun's rendezvous server, or None."""
        address = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = port_in(env, "HOROVOD_GLOO_RENDEZVOUS_PORT")
        return LauncherStore(self.name, address, port) if address and port else None

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that horovodrun sets; derive the port from `start`.

        No server listens on this port.
        """
        peers = [n for n, tasks in enumerate(tasks_per_node) if tasks > world.local_rank]
        node = world.node_rank or 0
        return {
            **super().environ(world, tasks_per_node, start),
            "HOROVOD_CROSS_RANK": str(peers.index(node)),
            "HOROVOD_CROSS_SIZE": str(len(peers)),
            "HOROVOD_HOSTNAME": world.hosts[node] if world.hosts else "localhost",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(20000 + start % 12000),
        }


class SubmititLocal(Launcher):
    """The variables SUBMITIT_LOCAL_*, used if SUBMITIT_EXECUTOR is "local".

    In a job that submitit submits to Slurm, srun starts the ranks.
    """

    name = "submitit"
    reason = "before Slurm: its tasks inherit the variables of the step that it was called in"
    marks = ("SUBMITIT_EXECUTOR",)
    recognised_by = "SUBMITIT_EXECUTOR=local"
    inside = frozenset({"slurm", "pmi"})
    variables = {
        "rank": ("SUBMITIT_LOCAL_GLOBALID",),
        "world_size": ("SUBMITIT_LOCAL_NTASKS",),
        "local_rank": ("SUBMITIT_LOCAL_LOCALID",),
        "node_rank": ("SUBMITIT_LOCAL_NODEID",),
        "num_nodes": ("SUBMITIT_LOCAL_JOB_NUM_NODES",),
    }
    constants = {"SUBMITIT_EXECUTOR": "local"}
    starts = ("SUBMITIT_LOCAL_JOB_ID",)

    def matches(self, env: Environ) -> bool:
        """Check whether the executor is local.

        In a Slurm job the SUBMITIT_LOCAL_* variables can come from an outer start.
        """
        return env.get("SUBMITIT_EXECUTOR") == "local"


class EnvLauncher(Launcher):
    """The env:// variables of torch.distributed, set manually or by an older launcher.

    The older launchers are torch.distributed.launch and its copies. Before torch 1.9 they passed
    the local rank only as an argument of the script, `--local_rank=N`; later versions still do.
    """

    name = "env"
    reason = "after the launchers with more variables: scripts export these in addition"
    marks = ("RANK", "WORLD_SIZE")
    variables = {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK", LOCAL_RANK_ARGUMENT),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
    }
    # Outside of a job the ranks share no other value, so only MASTER_PORT is tried.
    jobs = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
    starts = ("MASTER_ADDR", "MASTER_PORT", *jobs)

    def others(self, env: Environ, world: World) -> tuple[str, ...]:
        """Return no hosts: the user sets the address of rank 0."""
        del env, world
        return ()

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the env:// variables and LOCAL_WORLD_SIZE; derive the port from `start`."""
        return {
            **super().environ(world, tasks_per_node, start),
            "MASTER_ADDR": world.hosts[0] if world.hosts else "127.0.0.1",
            "MASTER_PORT": str(20000 + start % 12000),
        }


class NoLauncher(Launcher):
    """A process that no launcher started: on a laptop, in a notebook, or with one GPU."""

    name = "none"
    recognised_by = "other launcher"
    reason = "last: it matches every environment"

    def matches(self, env: Environ) -> bool:
        """Return True for every environment."""
        del env
        return True

    def claims(self, env: Environ) -> Claims:
        """Return the values of rank 0 in a world of size 1."""
        del env
        zeros = dict.fromkeys(("rank", "local_rank", "node_rank"), 0)
        ones = dict.fromkeys(("world_size", "local_world_size", "num_nodes"), 1)
        return {field: Claim(value, "no launcher") for field, value in (zeros | ones).items()}

    def world(self, env: Environ) -> World:
        """Return rank 0 in a world of size 1."""
        return World(**{field: claim.value for field, claim in self.claims(env).items()})
