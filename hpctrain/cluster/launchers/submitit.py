"""The local executor of submitit; in a job that submitit submits to Slurm, srun starts the ranks.

Source: submitit/local/local.py, submitit 1.5.4.
"""

from hpctrain.cluster.launchers.base import Environ, Launcher

__all__ = ["SubmititLocal"]


class SubmititLocal(Launcher):
    """The variables SUBMITIT_LOCAL_*, used if SUBMITIT_EXECUTOR is "local"."""

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
