"""The launcher mpirun_rsh of MVAPICH2.

Source: MVAPICH2 2.3 User Guide, and src/pm/mpirun/mpispawn.c of its source package.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import SCHEDULERS, Environ, Launcher, hosts_of_job
from hpctrain.cluster.world import World

__all__ = ["MVAPICH2"]


class MVAPICH2(Launcher):
    """The variables MV2_COMM_WORLD_*; other MV2_* variables are settings of the library."""

    name = "mvapich2"
    reason = "before hydra: its mpiexec sets the variables of both, with the same values"
    marks = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    inside = SCHEDULERS
    variables = {
        "rank": ("MV2_COMM_WORLD_RANK",),
        "world_size": ("MV2_COMM_WORLD_SIZE",),
        "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("MV2_COMM_WORLD_LOCAL_SIZE",),
        "node_rank": ("MV2_NODE_ID",),
        "num_nodes": ("MV2_NUM_NODES_IN_JOB",),
    }
    # Without PMI_PORT: it is the port of each host's mpispawn and so differs between hosts.
    starts = ("MPISPAWN_MPIRUN_HOST", "MPISPAWN_MPIRUN_PORT", "MPISPAWN_MPIRUN_ID")

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, else the first host of the job."""
        address, port = super().main(env, world)
        hosts = hosts_of_job(env)
        return address or (hosts[0] if hosts else None), port

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that mpirun_rsh sets; derive its id from `start`."""
        return {
            "MV2_COMM_WORLD_RANK": str(world.rank),
            "MV2_COMM_WORLD_SIZE": str(world.world_size),
            "MV2_COMM_WORLD_LOCAL_RANK": str(world.local_rank),
            "MV2_COMM_WORLD_LOCAL_SIZE": str(tasks_per_node[world.node_rank or 0]),
            "MV2_NODE_ID": str(world.node_rank),
            "MV2_NUM_NODES_IN_JOB": str(world.num_nodes),
            "MPISPAWN_MPIRUN_ID": str(start),
        }
