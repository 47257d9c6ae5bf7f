"""The launcher horovodrun over gloo; `horovodrun --mpi` uses mpirun and is read as Open MPI.

Source: horovod/runner/gloo_run.py, Horovod 0.28.1.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import SCHEDULERS, Environ, Launcher, LauncherStore, port_in
from hpctrain.cluster.world import World

__all__ = ["Horovodrun"]


class Horovodrun(Launcher):
    """The variables that horovodrun gives to each process over ssh.

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
