"""Variables of PMI or PMIx alone, from prterun or from an unsupported launcher.

PMI has no local rank, and PMIx has no world size either. So the user has to set LOCAL_RANK and
WORLD_SIZE; otherwise an error asks for them.

Source: the PMI-1 protocol's PMI_RANK and PMI_SIZE; PMIx Standard 4.1, "Environmental variables".
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from hpctrain.cluster.launchers.base import Launcher
from hpctrain.cluster.world import World

__all__ = ["Prterun", "UnknownPMI"]


class UnknownPMI(Launcher):
    """An unsupported launcher that sets variables of PMI or PMIx."""

    name = "pmi"
    reason = "after all launchers that also set these variables; missing values are never guessed"
    marks: ClassVar[tuple[str, ...]] = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK")
    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rank": ("PMI_RANK", "PMIX_RANK"),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("LOCAL_RANK",),
    }
    starts = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "MASTER_PORT")

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables of a PMI launcher, and LOCAL_RANK, which the user has to set."""
        del tasks_per_node
        return {
            "PMI_RANK": str(world.rank),
            "PMI_SIZE": str(world.world_size),
            "PMI_JOBID": str(start),
            "LOCAL_RANK": str(world.local_rank),
        }


class Prterun(Launcher):
    """The launcher prterun of PRRTE, the base of Open MPI 5. It sets only a rank."""

    name = "prterun"
    reason = "before Slurm: in a job, its daemons on other hosts are tasks of a Slurm step"
    marks = ("PRTE_LAUNCHED",)
    inside = frozenset({"slurm", "flux", "pals", "submitit"})
    variables = {
        "rank": ("PMIX_RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
    }
    starts = ("PMIX_NAMESPACE",)

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables of prterun, and those that the user has to set."""
        del tasks_per_node
        return {
            "PRTE_LAUNCHED": "1",
            "PMIX_NAMESPACE": f"prterun-localhost-{start}@1",
            "PMIX_RANK": str(world.rank),
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(world.local_rank),
        }
