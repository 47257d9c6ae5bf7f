"""Start of ranks on the hosts of a Slurm job, with srun."""

from collections.abc import Mapping, Sequence

from hpctrain.cluster import slurm
from hpctrain.cluster.hostlist import compress, expand
from hpctrain.cluster.launchers.base import hosts_of_job
from hpctrain.cluster.launchers.slurm import expand_counts
from hpctrain.errors import ContradictionError
from hpctrain.launch import supervisor
from hpctrain.launch.hosts import StartParameters
from hpctrain.launch.rank_output import write_stderr

__all__ = ["InSlurm"]


class InSlurm:
    """Hosts of a Slurm job; a job submitted with --no-kill survives the loss of some hosts.

    Args:
        env: environment of the batch script or salloc shell.

    Raises:
        ContradictionError: SLURM_TASKS_PER_NODE does not fit SLURM_JOB_NODELIST.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        names = hosts_of_job(env)
        tasks_per_node = env.get("SLURM_TASKS_PER_NODE", "")
        counts = expand_counts(tasks_per_node) if tasks_per_node else [1] * len(names)
        if len(counts) != len(names):
            raise ContradictionError(
                "HT101",
                f"SLURM_TASKS_PER_NODE={tasks_per_node} and {len(names)} hosts in "
                "SLURM_JOB_NODELIST",
                "a number for each host",
                "leave SLURM_* as sbatch or salloc set them",
            )
        self.slots: Mapping[str, int] = dict(zip(names, counts, strict=True))
        self._env = env

    def present(self, marker: str) -> list[str]:
        """Return the hosts that are still in the job; Slurm itself ends the tasks of a step."""
        del marker
        try:
            in_job = set(expand(slurm.hosts_left(self._env["SLURM_JOB_ID"], self._env)))
        except slurm.NoAnswerError as error:
            write_stderr(
                f"hpctrain: squeue did not list the hosts of the job, so all are used: {error}\n"
            )
            return list(self.slots)
        return [host for host in self.slots if host in in_job]

    def run(self, hosts: Sequence[str], start: StartParameters) -> tuple[int, bool]:
        """Run srun with each host's number of tasks."""
        counts = [self.slots[host] for host in hosts]
        environ = dict(start.environ)
        if len(set(counts)) == 1:
            layout = [f"--ntasks-per-node={counts[0]}"]
        else:
            file = start.folder / f"{start.exit_status_file.name}.hosts"
            file.write_text("".join(f"{host}\n" * self.slots[host] for host in hosts))
            environ["SLURM_HOSTFILE"] = str(file)
            layout = ["--distribution=arbitrary"]
        command = [
            # For Slurm, the step with a lost host still runs and holds the other hosts' CPUs.
            *("srun", "--overlap", "--kill-on-bad-exit=1"),
            f"--cpus-per-task={environ.get('SLURM_CPUS_PER_TASK', '1')}",
            *(f"--nodes={len(hosts)}", f"--ntasks={sum(counts)}", f"--nodelist={compress(hosts)}"),
            *(*layout, *start.command),
        ]
        outcome = supervisor.run(command, {0: environ}, start.exit_status_file, labelled=False)
        return outcome.code, outcome.signal is not None
