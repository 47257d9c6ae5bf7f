"""The launchers mpiexec and aprun of Cray PALS, on HPE Cray EX.

Source: pals(7) and mpiexec(1), "Environment variables", HPE Parallel Application Launch Service.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import Launcher
from hpctrain.cluster.world import World

__all__ = ["PALS"]


class PALS(Launcher):
    """The variables PALS_*, and PMI_SIZE, which PALS also sets."""

    name = "pals"
    reason = "after Slurm and Flux, whose plugins for Cray's MPI set its variables too"
    marks = ("PALS_RANKID", "PALS_LOCAL_RANKID")
    variables = {
        "rank": ("PALS_RANKID",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("PALS_LOCAL_RANKID",),
        "local_world_size": ("PALS_LOCAL_SIZE",),
        "node_rank": ("PALS_NODEID",),
    }
    starts = ("PALS_APID", "PBS_JOBID")

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that PALS sets; derive the application id from `start`."""
        return {
            "PALS_APID": str(start),
            "PALS_RANKID": str(world.rank),
            "PALS_LOCAL_RANKID": str(world.local_rank),
            "PALS_LOCAL_SIZE": str(tasks_per_node[world.node_rank or 0]),
            "PALS_NODEID": str(world.node_rank),
            "PMI_RANK": str(world.rank),
            "PMI_SIZE": str(world.world_size),
        }
