"""The env:// variables of torch.distributed, set manually or by an older launcher.

The older launchers are torch.distributed.launch and its copies. Before torch 1.9 they passed the
local rank only as an argument of the script, `--local_rank=N`; later versions still pass it.

Source: the section "Environment variable initialization" of torch.distributed's documentation, and
torch/distributed/launch.py.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.ancestors import LOCAL_RANK_ARGUMENT
from hpctrain.cluster.launchers.base import Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["EnvLauncher"]

_JOBS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")


class EnvLauncher(Launcher):
    """The variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""

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
    starts = ("MASTER_ADDR", "MASTER_PORT", *_JOBS)

    def only_port(self, env: Environ) -> bool:
        """Check whether there is no job, so that only the port identifies this start."""
        return not any(env.get(name) for name in _JOBS)

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
