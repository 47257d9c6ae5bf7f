"""Variables of the ranks of `hpctrain run` in a job, beside those of the tasks of srun."""

import json
from pathlib import Path

import launches
import pytest

pytestmark = pytest.mark.slurm

SHOWS = """
import json, os, sys
of_srun = ("SLURM", "SRUN", "PMI")
own = {name: value for name, value in os.environ.items() if name.startswith(of_srun)}
with open(f"{sys.argv[1]}-{own['SLURM_PROCID']}.json", "w") as file:
    json.dump(own, file)
"""
JOB = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=2 --time=5 --output=job.log
srun --mpi=none --distribution=block {python} shows.py task
exec {python} -m hpctrain run -- {python} shows.py rank
"""
# They connect a task to its srun, or are of one process. With SLURM_STEP_ID, Open MPI would abort.
OF_ONE_TASK = {
    "SLURM_STEP_ID",
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"),
    *("SLURM_TASK_PID", "SLURM_MPI_TYPE", "SRUN_DEBUG"),
}
# Each step has its own number; agents are given the processors of the node.
DIFFER = {"SLURM_STEPID", "SLURM_CPUS_PER_TASK", "SLURM_LAUNCH_NODE_IPADDR"}


def test_ranks_of_a_job_have_the_variables_of_a_task_of_srun(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shows.py").write_text(SHOWS)
    Path("job.sh").write_text(JOB.format(python=launches.PYTHON))
    done = cluster.run(
        ["sbatch", "--parsable", "job.sh"], env=launches.on_cluster(cluster), cwd=tmp_path
    )
    assert cluster.ended(done.stdout.strip())[1] == 0, Path("job.log").read_text()
    for number in range(6):
        task, rank = (
            json.loads(Path(f"{kind}-{number}.json").read_text()) for kind in ("task", "rank")
        )
        assert task.keys() - rank.keys() <= OF_ONE_TASK
        assert rank.keys() - task.keys() <= {"SLURM_CPUS_PER_TASK"}
        unlike = {name for name in rank.keys() & task.keys() if rank[name] != task[name]}
        assert unlike <= DIFFER, {name: (task[name], rank[name]) for name in unlike - DIFFER}
