"""Hosts of a job of PBS or Flux: mpirun or `flux run` starts an agent on each; this machine."""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import commands, env_vars
from hpctrain.cluster.launchers.base import hosts_of_job
from hpctrain.errors import StartError, UsageError
from hpctrain.launch.job_hosts import Command, JobHosts
from hpctrain.launch.plan import Plan

__all__ = ["hosts_of", "this_machine"]

_SECONDS_TO_ANSWER = 30.0


class _OtherJob(JobHosts):
    """Hosts of a job without a command that shows which of them are lost.

    Args:
        counts, nproc: see `JobHosts`.
        starter: function of hosts and environment that returns the words before a command that
            start it once on each host, bound to no core.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        nproc: str | None,
        starter: Callable[[Sequence[str], Mapping[str, str]], list[str]],
    ) -> None:
        super().__init__(counts, nproc)
        self._starter = starter

    def present(self) -> list[str]:
        """Return all hosts."""
        return list(self.names)

    def command(
        self, hosts: Sequence[str], plan: Plan, environ: Mapping[str, str], folder: Path
    ) -> Command:
        """Return a command that starts an agent on each host."""
        own = dict(environ)
        # Not each launcher passes the environment to other hosts, and command lines are public.
        file = folder / "agent.json"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
            json.dump({"agent": own.pop(env_vars.AGENT), "environ": own}, stream)
        agent = [sys.executable, "-m", "hpctrain.launch.agent", str(file)]
        return [*self._starter(hosts, own), *agent], own


class _ThisMachine(_OtherJob):
    def answers(self, host: str) -> bool:
        """Return True: an agent that was killed can be started again."""
        return True


def this_machine(nproc: str | None) -> JobHosts:
    """Return this machine as the only host, so that its ranks are started again after a failure.

    Raises:
        UsageError: `nproc` is no number of ranks.
    """
    return _ThisMachine({socket.gethostname(): 0}, nproc, lambda *_: [])


def _mpirun(hosts: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the words of mpirun.

    Sources: mpirun(1) of Open MPI 4.1 and 5.0; "Using the Hydra Process Manager" of MPICH;
    "Hydra Environment Variables" and "Hydra Command-line Options" of Intel MPI.
    """
    names = ",".join(hosts)
    command = ["mpirun", "-n", str(len(hosts))]
    version = _answer("mpirun", "--version")
    if "HYDRA" in version or "Intel" in version:
        return [*command, "-ppn", "1", "-hosts", names, "-genv", "I_MPI_PIN", "0"]
    path = ["-x", "PYTHONPATH"] if env.get("PYTHONPATH") else []
    return [*command, "--host", names, "--bind-to", "none", *path]


def _flux_run(hosts: Sequence[str], _: Mapping[str, str]) -> list[str]:
    """Return the words of `flux run`.

    Source: flux-run(1) of flux-core.
    """
    count = str(len(hosts))
    # It hides all GPUs from a task that was given none.
    options = ["-o", "cpu-affinity=off", "-o", "gpu-affinity=off"]
    return ["flux", "run", "--nodes", count, "--ntasks", count, *options]


def hosts_of(env: Mapping[str, str], nproc: str | None) -> JobHosts | None:
    """Return the hosts of the job of PBS or Flux in which this process runs.

    Args:
        env: environment of the job's script or shell.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it; None for the
            processes of the job if PBS was asked for more than one on a host, else one for each
            GPU.

    Returns:
        The hosts; None outside of such a job, or if it has a single host.

    Raises:
        StartError: the hosts cannot be read, or there is no launcher.
        UsageError: `nproc` does not fit the hosts, or it is a job of LSF with several hosts, where
            hpctrain starts no ranks.
    """
    if env.get("FLUX_URI"):
        # Source: flux-hostlist(1). "local" stands for the hosts of the script's instance; without
        # it, newer versions read a list from standard input.
        counts = dict.fromkeys(_answer("flux", "hostlist", "--expand", "local").split(), 0)
    elif env.get("PBS_NODEFILE"):
        try:
            lines = Path(env["PBS_NODEFILE"]).read_text().split()
        except OSError as error:
            raise StartError("HT211.no-nodefile", path=env["PBS_NODEFILE"], error=error) from None
        # One line for each process of `mpiprocs`.
        counts = {host: lines.count(host) for host in lines}
        if max(counts.values(), default=0) < 2:
            counts = dict.fromkeys(counts, 0)
    else:
        counts = {}
        if len(hosts := hosts_of_job(env)) > 1:
            raise UsageError("HT211.several-nodes-of-lsf", nodes=len(hosts))
    if len(counts) < 2:
        return None
    return _OtherJob(counts, nproc, _flux_run if env.get("FLUX_URI") else _mpirun)


def _answer(*command: str) -> str:
    """Return what a command prints.

    Raises:
        StartError: there is no such command, or it fails.
    """
    try:
        result = commands.run(list(command), _SECONDS_TO_ANSWER)
        if result.returncode == 0:
            return result.stdout
        reason = result.stderr.strip() or f"exit code {result.returncode}"
    except commands.NoAnswerError as error:
        reason = str(error)
    raise StartError(
        "HT211.launcher-failed", command=" ".join(command), reason=reason, program=command[0]
    )
