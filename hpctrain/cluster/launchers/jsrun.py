"""The launcher jsrun of IBM Spectrum LSF's Job Step Manager.

Source: IBM Job Step Manager's reference, "Environment variables"; LSF's reference for LSB_*.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["Jsrun"]


class Jsrun(Launcher):
    """The variables JSM_NAMESPACE_*. Open MPI's are also set and must have the same values."""

    name = "jsrun"
    reason = "before Open MPI, whose variables it sets as well"
    marks = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
    variables = {
        "rank": ("JSM_NAMESPACE_RANK",),
        "world_size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_world_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
    }
    starts = ("LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE")

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, else LSF's first host after the batch host, which runs no tasks."""
        address, port = super().main(env, world)
        hosts = env.get("LSB_MCPU_HOSTS", "").split()[::2]
        computing = hosts[1:] or hosts
        return address or (computing[0] if computing else None), port

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that jsrun sets; derive LSF's job id from `start`."""
        hosts = ("batch", *(world.hosts or ("localhost",)))
        cores = (1, *tasks_per_node)
        pairs = " ".join(f"{host} {n}" for host, n in zip(hosts, cores, strict=True))
        return {
            "LSB_JOBID": str(start),
            "LSB_MCPU_HOSTS": pairs,
            "JSM_NAMESPACE_RANK": str(world.rank),
            "JSM_NAMESPACE_SIZE": str(world.world_size),
            "JSM_NAMESPACE_LOCAL_RANK": str(world.local_rank),
            "JSM_NAMESPACE_LOCAL_SIZE": str(tasks_per_node[world.node_rank or 0]),
        }
