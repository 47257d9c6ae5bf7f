"""The launcher mpirun of MPICH and of Intel MPI, called Hydra.

Source: the environment that Hydra's proxy sets (src/pm/hydra/proxy in MPICH 4.0), and Intel MPI's
Developer Reference, "Hydra Environment Variables".
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.ancestors import CONTROL_PORT, PARENT
from hpctrain.cluster.launchers.base import SCHEDULERS, Environ, Launcher, hosts_of_job
from hpctrain.cluster.world import World

__all__ = ["Hydra"]


class Hydra(Launcher):
    """The rank and size of PMI, with the local rank and size that only hydra sets."""

    name = "hydra"
    reason = "before Slurm and Flux, which set PMI_RANK too, but no MPI_LOCALRANKID"
    marks = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    inside = SCHEDULERS
    variables = {
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_world_size": ("MPI_LOCALNRANKS",),
    }

    def key(self, env: Environ) -> str:
        """Return Intel MPI's id of the start, or a replacement for MPICH.

        MPICH sets no variable that identifies a start. The port of its mpiexec identifies it: the
        proxies have it in their arguments. If /proc does not show them, the key is made of the
        job, the address and port set by the user, and on a single host the proxy's process id.
        """
        if env.get("I_MPI_HYDRA_UUID"):
            return f"{self.name}/{env['I_MPI_HYDRA_UUID']}"
        if env.get(CONTROL_PORT):
            return f"{self.name}/{env[CONTROL_PORT]}"
        names = ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID"]
        names += ["MASTER_ADDR", "MASTER_PORT"]
        if env.get("MPI_LOCALNRANKS") == env.get("PMI_SIZE"):
            names.append(PARENT)
        return "/".join([self.name, *(env.get(name, "") for name in names)])

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, else the first host of the job."""
        address, port = super().main(env, world)
        hosts = hosts_of_job(env)
        return address or (hosts[0] if hosts else None), port

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that hydra sets; derive the rendezvous port from `start`."""
        return {
            "PMI_RANK": str(world.rank),
            "PMI_SIZE": str(world.world_size),
            "MPI_LOCALRANKID": str(world.local_rank),
            "MPI_LOCALNRANKS": str(tasks_per_node[world.node_rank or 0]),
            "MASTER_PORT": str(20000 + start % 12000),
        }
