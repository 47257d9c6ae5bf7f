"""Start of ranks on the hosts of a Slurm job: srun starts an agent on each."""

import json
import queue
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hpctrain.cluster import env_vars, slurm
from hpctrain.cluster.hostlist import compress, expand
from hpctrain.cluster.launchers.base import hosts_of_job
from hpctrain.cluster.launchers.slurm import expand_counts
from hpctrain.errors import ContradictionError
from hpctrain.launch import supervisor
from hpctrain.launch.agent import Plan
from hpctrain.launch.hosts import Attempt, HostsEnd, read_ends
from hpctrain.launch.rank_output import write_stderr
from hpctrain.process import failure_record

__all__ = ["InSlurm"]

# Variables from which srun takes the size and the binding of a step. An agent gets all of its host.
# Source: INPUT ENVIRONMENT VARIABLES of srun(1), Slurm 22.05 to 25.05.
_OF_THE_STEP = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_CORE"),
    *("SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND"),
    *("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_HINT", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE"),
    *("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_WHOLE", "SLURM_OVERCOMMIT", "SLURM_STEP_GRES"),
    *("SLURM_THREADS_PER_CORE", "SLURM_CORE_SPEC", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
)


class InSlurm:
    """Hosts of a Slurm job; a job submitted with --no-kill survives the loss of some hosts.

    Args:
        env: environment of the batch script or of the allocation's shell.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it; None for the
            job's tasks if it asked for more than one on a host, else one for each GPU.

    Raises:
        ContradictionError: SLURM_TASKS_PER_NODE does not fit SLURM_JOB_NODELIST.
    """

    def __init__(self, env: Mapping[str, str], nproc: str | None = None) -> None:
        self.names: Sequence[str] = hosts_of_job(env)
        counts = None
        if nproc is not None and nproc != "auto":
            pieces = nproc.split(",")
            counts = [int(piece) if piece.isdecimal() else 0 for piece in pieces]
            counts *= len(self.names) if len(counts) == 1 else 1
        elif nproc is None:
            counts = _tasks(env, self.names)
        self._nproc = nproc if counts is None or len(counts) != len(self.names) else None
        self._counts = dict(zip(self.names, counts or [0] * len(self.names), strict=False))
        self._env = env

    def ranks(self, host: str) -> int:
        """Return the number of ranks of a host; 1 if its agent decides."""
        return self._counts.get(host) or 1

    def present(self, launch: str) -> list[str]:
        """Return the hosts that are still in the job; Slurm itself ends the tasks of a step."""
        del launch
        try:
            in_job = set(expand(slurm.hosts_left(self._env["SLURM_JOB_ID"], self._env)))
        except slurm.NoAnswerError as error:
            write_stderr(
                f"hpctrain: squeue did not list the hosts of the job, so all are used: {error}\n"
            )
            return list(self.names)
        return [host for host in self.names if host in in_job]

    def fixes(self, host: str) -> Sequence[str]:
        """Return what to type if a host cannot be used."""
        return (f"scontrol show node {host} (shows the reason)", f"#SBATCH --exclude={host}")

    def run(self, hosts: Sequence[str], attempt: Attempt) -> HostsEnd:
        """Run srun with one agent on each host."""
        nproc = self._nproc or "auto"
        if self._nproc is None and any(self._counts.values()):
            nproc = ",".join(str(self._counts[host]) for host in hosts)
        plan = Plan(attempt.command, nproc, str(attempt.folder), attempt.launch, attempt.number)
        environ = {
            name: value for name, value in attempt.environ.items() if name not in _OF_THE_STEP
        }
        environ[env_vars.AGENT] = json.dumps(asdict(plan))
        count = len(hosts)
        command = [
            # For Slurm, the step with a lost host still runs and holds the other hosts' CPUs.
            *("srun", "--quiet", "--overlap", "--kill-on-bad-exit=1", "--mpi=none"),
            *("--unbuffered", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
            *(f"--nodelist={compress(hosts)}", sys.executable, "-m", "hpctrain.launch.agent"),
        ]
        step = attempt.folder / "step"
        step.mkdir(mode=0o700)
        stop_file = attempt.folder / "stop"
        environ[env_vars.STOP_FILE] = str(stop_file)

        def forward(number: int) -> str:
            # srun would end the step at once. A stop file is seen by the ranks on all hosts.
            if failure_record.sessions(attempt.folder):
                stop_file.touch()
                return "stops the run, which saves first"
            events.put(number)
            return "ends the ranks"

        events: supervisor.Events = queue.SimpleQueue()
        outcome = supervisor.run(
            command,
            {0: environ},
            step / "exit-status",
            labelled=False,
            events=events,
            temporary=False,
            forward=forward,
        )
        return read_ends(attempt.folder, outcome.code, outcome.signal is not None)


def _tasks(env: Mapping[str, str], hosts: Sequence[str]) -> list[int] | None:
    """Return the tasks of each host, if the job asked for more than one on any of them.

    Raises:
        ContradictionError: the variable does not fit the hosts.
    """
    text = env.get("SLURM_TASKS_PER_NODE", "")
    counts = expand_counts(text) if text else []
    if counts and len(counts) != len(hosts):
        raise ContradictionError(
            "HT101",
            f"SLURM_TASKS_PER_NODE={text} and {len(hosts)} hosts in SLURM_JOB_NODELIST",
            "a number for each host",
            "leave SLURM_* as sbatch or salloc set them",
        )
    return counts if any(count > 1 for count in counts) else None
