"""The launcher `flux run`.

Source: flux-environment(7), "Variables set in the job environment", flux-core.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import Launcher
from hpctrain.cluster.world import World

__all__ = ["Flux"]


class Flux(Launcher):
    """The variables FLUX_TASK_* and FLUX_JOB_*. Each `flux run` is a separate job."""

    name = "flux"
    reason = "before Slurm, in whose jobs a Flux instance is often started"
    marks = ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")
    inside = frozenset({"slurm", "pmi"})
    variables = {
        "rank": ("FLUX_TASK_RANK",),
        "world_size": ("FLUX_JOB_SIZE",),
        "local_rank": ("FLUX_TASK_LOCAL_ID",),
        "num_nodes": ("FLUX_JOB_NNODES",),
    }
    starts = ("FLUX_JOB_ID", "FLUX_URI")

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that flux sets; derive the job id from `start`."""
        return {
            "FLUX_JOB_ID": str(start),
            "FLUX_JOB_SIZE": str(world.world_size),
            "FLUX_JOB_NNODES": str(world.num_nodes),
            "FLUX_TASK_RANK": str(world.rank),
            "FLUX_TASK_LOCAL_ID": str(world.local_rank),
            "PMI_RANK": str(world.rank),
            "PMI_SIZE": str(world.world_size),
        }
