"""submitit's local executor. (In a job that submitit gave to Slurm, the ranks are Slurm's.)

Source: submitit/local/local.py, submitit 1.5.4.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["SubmititLocal"]


class SubmititLocal(Launcher):
    """SUBMITIT_LOCAL_*, where SUBMITIT_EXECUTOR says that they are meant."""

    name = "submitit"
    reason = "before Slurm: its tasks inherit the variables of the step that it was called in"
    marks = ("SUBMITIT_EXECUTOR",)
    inside = frozenset({"slurm", "pmi"})
    variables = {
        "rank": ("SUBMITIT_LOCAL_GLOBALID",),
        "world_size": ("SUBMITIT_LOCAL_NTASKS",),
        "local_rank": ("SUBMITIT_LOCAL_LOCALID",),
        "node_rank": ("SUBMITIT_LOCAL_NODEID",),
        "num_nodes": ("SUBMITIT_LOCAL_JOB_NUM_NODES",),
    }
    starts = ("SUBMITIT_LOCAL_JOB_ID",)

    def matches(self, env: Environ) -> bool:
        """The executor is local: in a Slurm job these variables can be those of an outer one."""
        return env.get("SUBMITIT_EXECUTOR") == "local"

    @property
    def recognised_by(self) -> str:
        """The executor's name."""
        return "SUBMITIT_EXECUTOR=local"

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """What the local executor sets; the job's id follows from `start`."""
        return {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": str(start),
            "SUBMITIT_LOCAL_GLOBALID": str(world.rank),
            "SUBMITIT_LOCAL_NTASKS": str(world.world_size),
            "SUBMITIT_LOCAL_LOCALID": str(world.local_rank),
            "SUBMITIT_LOCAL_NODEID": str(world.node_rank),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": str(world.num_nodes),
        }
