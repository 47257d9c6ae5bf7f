"""The launcher mpirun of Open MPI and its derivatives, also used by `horovodrun --mpi`.

Source: "Environment variables that Open MPI sets at run time" in Open MPI's FAQ and mpirun(1),
Open MPI 4.1.
"""

import re
from collections.abc import Sequence

from hpctrain.cluster.launchers.base import SCHEDULERS, Claims, Environ, Launcher, hosts_of_job
from hpctrain.cluster.world import World

__all__ = ["OpenMPI"]

# `1645608960.0;tcp://10.0.0.1,192.168.0.1:36701;tcp6://[fd00::1]:38175`
_URI = re.compile(r";tcp://([^,:;]+)")


class OpenMPI(Launcher):
    """The variables that mpirun's daemons set.

    `OMPI_COMM_WORLD_NODE_RANK` is not the index of a node: it counts the processes on this node.
    """

    name = "openmpi"
    reason = "before Slurm: in a job, mpirun's daemons on other hosts are tasks of a Slurm step"
    marks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    inside = SCHEDULERS
    variables = {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "num_nodes": ("OMPI_MCA_orte_num_nodes",),
    }
    starts = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri")

    def claims(self, env: Environ) -> Claims:
        """Return the values of the variables; omit an impossible number of hosts.

        With `--map-by seq` and a hostfile in a Slurm job, Open MPI 4.1.4 counts hosts twice on
        some hosts. The rendezvous then provides the correct number.
        """
        claims = super().claims(env)
        if {"world_size", "local_world_size", "num_nodes"} <= claims.keys():
            elsewhere = claims["world_size"].value - claims["local_world_size"].value
            if claims["num_nodes"].value - 1 > elsewhere:
                del claims["num_nodes"]
        return claims

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, else the first host of the job, else the host of mpirun."""
        address, port = super().main(env, world)
        uri = _URI.search(env.get("OMPI_MCA_orte_hnp_uri", ""))
        hosts = hosts_of_job(env)
        return address or (hosts[0] if hosts else None) or (uri[1] if uri else None), port

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that mpirun sets; derive the name of its job from `start`."""
        job = str(start << 16 | 1)
        return {
            "OMPI_COMM_WORLD_RANK": str(world.rank),
            "OMPI_COMM_WORLD_SIZE": str(world.world_size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(world.local_rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(tasks_per_node[world.node_rank or 0]),
            "OMPI_COMM_WORLD_NODE_RANK": str(world.local_rank),
            "OMPI_MCA_orte_num_nodes": str(world.num_nodes),
            "OMPI_APP_CTX_NUM_PROCS": str(world.world_size),
            "OMPI_FIRST_RANKS": "0",
            "OMPI_NUM_APP_CTX": "1",
            "OMPI_UNIVERSE_SIZE": str(world.world_size),
            "PMIX_HOSTNAME": world.hosts[world.node_rank or 0] if world.hosts else "localhost",
            "PMIX_NAMESPACE": job,
            "PMIX_RANK": str(world.rank),
        }
