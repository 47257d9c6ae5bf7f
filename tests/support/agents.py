"""A job of hosts that this machine simulates, for `hpctrain run` with real agents and no Slurm."""

import os
import shlex
import sys
from pathlib import Path

from hpctrain import rundir
from hpctrain.launch import job_supervisor
from hpctrain.launch.job_hosts import JobHosts
from hpctrain.launch.plan import Plan

# One agent for each host, as srun starts it; they end with this shell.
_START = """
trap 'kill $(jobs -p) 2>/dev/null' EXIT
for rank in {ranks}; do
    set -- {names}
    shift $rank
    SLURM_PROCID=$rank SLURM_NODEID=$rank SLURMD_NODENAME=$1 HPCTRAIN_HOSTNAME=$1 \\
        {python} -m hpctrain.launch.agent &
done
wait
"""


class LocalHosts(JobHosts):
    """Hosts of a simulated job.

    Args:
        count: number of hosts.
        nproc: number of ranks of each.
        gone: names of hosts that do not answer; the caller may change it.
    """

    def __init__(self, count, nproc=1, gone=()):
        names = [f"node{number}" for number in range(1, count + 1)]
        super().__init__(dict.fromkeys(names, nproc), None)
        self.gone, self.steps = gone, []

    def present(self):
        return [name for name in self.names if name not in self.gone]

    def answers(self, host):
        return host not in self.gone

    def command(self, hosts, plan, environ, folder):
        self.steps.append(list(hosts))
        ranks = " ".join(map(str, range(len(hosts))))
        python = shlex.quote(sys.executable)
        text = _START.format(ranks=ranks, names=" ".join(hosts), python=python)
        size = {"SLURM_NTASKS": str(len(hosts)), "SLURM_STEP_NUM_NODES": str(len(hosts))}
        step = {"SLURM_JOB_ID": "815", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
        listed = {
            "SLURM_STEP_NODELIST": ",".join(hosts),
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(hosts)})",
        }
        return ["bash", "-c", text], {**environ, **size, **step, **listed}


def main():
    """Run a program on simulated hosts: agents.py HOSTS NPROC RUN_DIR PROGRAM ARGS…"""
    count, nproc, directory, *command = sys.argv[1:]
    hosts = LocalHosts(int(count), int(nproc))
    rules = {"plain": True, "elastic": True} if os.environ.get("PLAIN") else {}
    plan = Plan(command, "", **rules)
    directory = rundir.RunDirectory(Path(directory))
    code, reason = job_supervisor.run(hosts, plan, directory, os.environ)
    print(f"ended {code}: {reason}; steps {hosts.steps}", flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
