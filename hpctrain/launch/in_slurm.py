"""Start of ranks in a Slurm job: by an agent on each host, by srun, or by a program of the user."""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster import env_vars, slurm
from hpctrain.cluster.hostlist import compress, expand
from hpctrain.cluster.launchers.base import hosts_of_job
from hpctrain.cluster.launchers.slurm import expand_counts
from hpctrain.errors import ContradictionError, UsageError
from hpctrain.launch.containers import pyxis
from hpctrain.launch.end import End
from hpctrain.launch.job_hosts import Command, JobHosts
from hpctrain.launch.plan import Plan
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import signal_name
from hpctrain.process import failure_record

__all__ = ["Direct", "InSlurm", "Once"]

_SECONDS_TO_ANSWER = 0.5  # without a repeat of the kernel, which comes after a second
# After sbatch --export=NONE, the tasks of srun would get no variable.
_EXPORT = "SLURM_EXPORT_ENV"
# Variables from which srun takes the size and the binding of a step. An agent gets all of its host.
# Source: INPUT ENVIRONMENT VARIABLES of srun(1), Slurm 22.05 to 25.05.
_OF_THE_STEP = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_CORE"),
    *("SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND"),
    "SLURM_TRES_BIND",
    *("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_HINT", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE"),
    *("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_WHOLE", "SLURM_OVERCOMMIT", "SLURM_STEP_GRES"),
    *("SLURM_THREADS_PER_CORE", "SLURM_CORE_SPEC", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    _EXPORT,
)


# srun reads each of them also for a part of a heterogeneous job.
_OF_A_PART = re.compile(r"_(HET|PACK)_GROUP_\d+\Z", re.ASCII)
_OF_ONE_PART = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")


class InSlurm(JobHosts):
    """Hosts of a Slurm job; a job submitted with --no-kill survives the loss of some hosts.

    srun starts an agent on each.

    Args:
        env: environment of the batch script or of the allocation's shell.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it; None for the
            job's tasks if it asked for more than one on a host, else one for each GPU.

    Raises:
        ContradictionError: SLURM_TASKS_PER_NODE does not fit SLURM_JOB_NODELIST.
        UsageError: `nproc` does not fit the hosts.
    """

    unusable = "HT210.slurm-nodes-unusable"

    def __init__(self, env: Mapping[str, str], nproc: str | None = None) -> None:
        names = hosts_of_job(env)
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError("HT101.node-in-two-parts", nodes=", ".join(sorted(twice)))
        counts = (_tasks(env, names) if nproc is None else None) or [0] * len(names)
        super().__init__(dict(zip(names, counts, strict=True)), nproc)
        self._env = env
        self._parts = slurm.hosts_of_parts(env)

    def present(self) -> list[str]:
        """Return the hosts that are still in the job; Slurm itself ends the tasks of a step."""
        try:
            in_job = set(expand(slurm.hosts_left(slurm.ids_of_parts(self._env), self._env)))
        except slurm.NoAnswerError as error:
            announce(f"squeue did not list the hosts of the job, so all are used: {error}")
            return list(self.names)
        return [host for host in self.names if host in in_job]

    def answers(self, host: str) -> bool:
        """Check whether slurmd of a host accepts a connection: Slurm notices a loss much later."""
        try:
            address = slurm.slurmd_address(host, self._env)
            socket.create_connection(address, _SECONDS_TO_ANSWER).close()
        except (OSError, slurm.NoAnswerError):
            return False
        return True

    def command(
        self, hosts: Sequence[str], plan: Plan, environ: Mapping[str, str], folder: Path
    ) -> Command:
        """Return an srun that starts an agent on each host, for as long as the job lives."""
        removed = {n: v for n, v in environ.items() if _OF_A_PART.sub("", n) in _OF_THE_STEP}
        own = {name: value for name, value in environ.items() if name not in removed}
        # They are those of the agents' step.
        for name in ("SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_HINT"):
            removed.pop(name, None)
        own[env_vars.STEP] = json.dumps(removed)
        agent = [sys.executable, "-m", "hpctrain.launch.agent"]
        # The step goes on without a host or an agent that is lost. For Slurm, such a step holds the
        # other hosts' CPUs. A site's WaitTime would end the agents after the first one of them.
        how = ["--quiet", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mpi=none"]
        how += ["--unbuffered", "--wait=0"]
        command = ["srun"]
        for group, _, names in self._groups(hosts):
            count = len(names)
            command += [":"] if len(command) > 1 else []
            command += [*group, *how, f"--nodes={count}", f"--ntasks={count}"]
            command += ["--ntasks-per-node=1", f"--nodelist={compress(names)}", *agent]
        return command, own

    def _groups(self, hosts: Sequence[str]) -> Iterator[tuple[list[str], str, list[str]]]:
        """Yield srun's option for each part of the job, the end of its variables, its hosts."""
        for number, part in enumerate(self._parts):
            if names := [host for host in hosts if host in part]:
                yield [f"--het-group={number}"], f"_HET_GROUP_{number}", names
        if not self._parts:
            yield [], "", list(hosts)


class Once(InSlurm):
    """The first host of a Slurm job, on which the program runs once; it starts its ranks itself."""

    agents = False

    def command(
        self, hosts: Sequence[str], plan: Plan, environ: Mapping[str, str], folder: Path
    ) -> Command:
        """Return the program with the variables of its start."""
        return list(plan.command), dict(environ)

    def end_of(self, folder: Path, end: End) -> End:
        """Return how the ranks ended, from their records, as other programs have started them."""
        failures, hosts = failure_record.failures(folder), failure_record.sessions(folder)
        found = [
            replace(
                end,
                code=failure.exit_code,
                rank=rank,
                host=hosts.get(rank, ""),
                time=failure.date,
                caused_by_other_rank=failure.caused_by_other_rank,
                brief=failure.description,
                error=failure.error,
            )
            for rank, failure in failures.items()
        ]
        if not (found and end.code):
            return replace(end, rank=None, ranks=max(len(failures), 1))
        first = End.of_hosts(found)
        killed = hosts.keys() - failures.keys()  # they could record nothing
        # srun kills other ranks, too; then it is not known which one was the first.
        if first.caused_by_other_rank and end.code > 128 and len(killed) == 1:
            (rank,), how = killed, f"with signal {signal_name(end.code - 128)}"
            first = replace(
                first,
                code=end.code,
                rank=rank,
                host=hosts[rank],
                caused_by_other_rank=False,
                brief=how,
                error="",
            )
        return replace(first, ranks=max(len(failures), 1))


class Direct(Once):
    """Hosts of a Slurm job on which srun starts each rank as a task, as for MPI."""

    def command(
        self, hosts: Sequence[str], plan: Plan, environ: Mapping[str, str], folder: Path
    ) -> Command:
        """Return an srun with the layout of the job."""
        own = {name: value for name, value in environ.items() if name != _EXPORT}
        how = ["--quiet", "--kill-on-bad-exit=1"]
        if plan.container:
            how += pyxis(plan.container, os.getcwd(), own, plan.variables)
        command = ["srun"]
        if self._parts:
            # Those of the first part would count for a part that has none.
            own = {name: value for name, value in own.items() if name not in _OF_ONE_PART}
        for group, suffix, _ in self._groups(hosts):
            cpus = own.get(f"SLURM_CPUS_PER_TASK{suffix}")
            command += [":"] if len(command) > 1 else []
            # Not every version of Slurm passes the CPUs from sbatch to srun.
            command += [*group, *how, *([f"--cpus-per-task={cpus}"] if cpus else [])]
            command += plan.command
        return command, own


def _tasks(env: Mapping[str, str], hosts: Sequence[str]) -> list[int] | None:
    """Return the tasks of each host, if the job asked for more than one on any of them.

    Raises:
        ContradictionError: the variable does not fit the hosts.
    """
    text = env.get("SLURM_TASKS_PER_NODE", "")
    counts = expand_counts(text, "SLURM_TASKS_PER_NODE") if text else []
    if counts and len(counts) != len(hosts):
        key, nodes = "HT101.tasks-per-node-incomplete", len(hosts)
        raise ContradictionError(key, tasks_per_node=text, nodes=nodes)
    return counts if any(count > 1 for count in counts) else None
