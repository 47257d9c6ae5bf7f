"""PMI's or PMIx's variables alone: of prterun, or of a launcher that is not known here.

PMI has no local rank, and PMIx no size either: a person has to add LOCAL_RANK and WORLD_SIZE, and
is told so.

Source: the PMI-1 protocol's PMI_RANK and PMI_SIZE; PMIx Standard 4.1, "Environmental variables".
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from hpctrain.cluster.launchers.base import Launcher
from hpctrain.cluster.world import World

__all__ = ["Prterun", "UnknownPMI"]


class UnknownPMI(Launcher):
    """One of several for certain."""

    name = "pmi"
    reason = "after all that set these variables too: refused for what is missing, never guessed"
    marks: ClassVar[tuple[str, ...]] = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK")
    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rank": ("PMI_RANK", "PMIX_RANK"),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("LOCAL_RANK",),
    }
    starts = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "MASTER_PORT")

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """What a PMI launcher sets, and what a person has to add."""
        del tasks_per_node
        return {
            "PMI_RANK": str(world.rank),
            "PMI_SIZE": str(world.world_size),
            "PMI_JOBID": str(start),
            "LOCAL_RANK": str(world.local_rank),
        }


class Prterun(Launcher):
    """prterun of PRRTE, on which Open MPI 5 is built: it starts anything, and says a rank only."""

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
        """What prterun sets, and what a person has to add."""
        del tasks_per_node
        return {
            "PRTE_LAUNCHED": "1",
            "PMIX_NAMESPACE": f"prterun-localhost-{start}@1",
            "PMIX_RANK": str(world.rank),
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(world.local_rank),
        }
