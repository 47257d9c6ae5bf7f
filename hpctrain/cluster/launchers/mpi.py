"""Launchers of MPI programs and of tasks in a job, which set rank and size under their own names.

Most of each class is data. Sources, in the order of the classes: "Environment variables that Open
MPI sets at run time" in Open MPI's FAQ and mpirun(1) of 4.1; MVAPICH2 2.3's User Guide and
src/pm/mpirun/mpispawn.c; src/pm/hydra/proxy in MPICH 4.0 and "Hydra Environment Variables" in Intel
MPI's Developer Reference; "Environment variables" in IBM Job Step Manager's reference, and LSF's
reference for LSB_*; "Variables set in the job environment" in flux-environment(7); "Environment
variables" in pals(7) and mpiexec(1) of HPE's Parallel Application Launch Service; PMIx Standard
4.1, "Environmental variables"; the PMI-1 protocol's PMI_RANK and PMI_SIZE.
"""

import re
from collections.abc import Sequence

from hpctrain.cluster.launchers.ancestors import CONTROL_PORT, PARENT
from hpctrain.cluster.launchers.base import SCHEDULERS, Claims, Environ, Launcher, hosts_of_job
from hpctrain.cluster.world import World

__all__ = ["MVAPICH2", "PALS", "Flux", "Hydra", "Jsrun", "OpenMPI", "Prterun", "UnknownPMI"]

# `1645608960.0;tcp://10.0.0.1,192.168.0.1:36701;tcp6://[fd00::1]:38175`
_URI = re.compile(r";tcp://([^,:;]+)")


class _Mpirun(Launcher):
    """The launchers that start the ranks of an MPI program, by default on the hosts of a job."""

    inside = SCHEDULERS

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, else the first host of the job."""
        address, port = super().main(env, world)
        return address or next(iter(hosts_of_job(env)), None), port


class OpenMPI(_Mpirun):
    """The launcher mpirun of Open MPI and its derivatives, also used by `horovodrun --mpi`.

    `OMPI_COMM_WORLD_NODE_RANK` is not the index of a node: it counts the processes on this node.
    """

    name = "openmpi"
    reason = "before Slurm: in a job, mpirun's daemons on other hosts are tasks of a Slurm step"
    marks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
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
        return address or (uri[1] if uri else None), port

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that mpirun sets, for scripts that read more than hpctrain."""
        return {
            **super().environ(world, tasks_per_node, start),
            "OMPI_COMM_WORLD_NODE_RANK": str(world.local_rank),
            "OMPI_UNIVERSE_SIZE": str(world.world_size),
            "PMIX_RANK": str(world.rank),
        }


class MVAPICH2(_Mpirun):
    """The launcher mpirun_rsh; other variables MV2_* are settings of the library."""

    name = "mvapich2"
    reason = "before hydra: its mpiexec sets the variables of both, with the same values"
    marks = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    variables = {
        "rank": ("MV2_COMM_WORLD_RANK",),
        "world_size": ("MV2_COMM_WORLD_SIZE",),
        "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("MV2_COMM_WORLD_LOCAL_SIZE",),
        "node_rank": ("MV2_NODE_ID",),
        "num_nodes": ("MV2_NUM_NODES_IN_JOB",),
    }
    # Without PMI_PORT: it is the port of each host's mpispawn and so differs between hosts.
    starts = ("MPISPAWN_MPIRUN_ID", "MPISPAWN_MPIRUN_HOST", "MPISPAWN_MPIRUN_PORT")


class Hydra(_Mpirun):
    """The launcher mpirun of MPICH and of Intel MPI."""

    name = "hydra"
    reason = "before Slurm and Flux, which set PMI_RANK too, but no MPI_LOCALRANKID"
    marks = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    variables = {
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_world_size": ("MPI_LOCALNRANKS",),
    }
    starts = ("I_MPI_HYDRA_UUID",)

    def key(self, env: Environ) -> str:
        """Return Intel MPI's id of the start, or a replacement for MPICH.

        MPICH sets no variable that identifies a start. The port of its mpiexec identifies it: the
        proxies have it in their arguments. If /proc does not show them, the key is made of the
        job, the address and port set by the user, and on a single host the proxy's process id.
        """
        for name in (*self.starts, CONTROL_PORT):
            if env.get(name):
                return f"{self.name}/{env[name]}"
        names = ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID"]
        names += ["MASTER_ADDR", "MASTER_PORT"]
        if env.get("MPI_LOCALNRANKS") == env.get("PMI_SIZE"):
            names.append(PARENT)
        return "/".join([self.name, *(env.get(name, "") for name in names)])


class Jsrun(Launcher):
    """The launcher of LSF's Job Step Manager. Open MPI's variables have to have the same values."""

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
        return address or next(iter(hosts[1:] or hosts), None), port


class Flux(Launcher):
    """The launcher `flux run`; each is a job of its own."""

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


class PALS(Launcher):
    """The launchers mpiexec and aprun of Cray PALS, on HPE Cray EX."""

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


class Prterun(Launcher):
    """The launcher prterun of PRRTE, the base of Open MPI 5. It sets only a rank."""

    name = "prterun"
    reason = "before Slurm: in a job, its daemons on other hosts are tasks of a Slurm step"
    marks = ("PRTE_LAUNCHED",)
    inside = frozenset({"slurm", "flux", "pals", "submitit"})
    # PMIx has no size and no local rank. So the user has to set them; an error asks for them.
    variables = {
        "rank": ("PMIX_RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
    }
    constants = {"PRTE_LAUNCHED": "1"}
    starts = ("PMIX_NAMESPACE",)


class UnknownPMI(Launcher):
    """An unsupported launcher that sets variables of PMI or PMIx."""

    name = "pmi"
    reason = "after all launchers that also set these variables; missing values are never guessed"
    marks = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK")
    # PMI has no local rank. So the user has to set it; an error asks for it.
    variables = {
        "rank": ("PMI_RANK", "PMIX_RANK"),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("LOCAL_RANK",),
    }
    starts = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "MASTER_PORT")
