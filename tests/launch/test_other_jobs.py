"""`hpctrain run` in jobs of PBS and Flux: mpirun or `flux run` starts an agent on each host.

The job of PBS is a stand-in: the variables and files of its batch script. mpirun is real, and
starts the agents over ssh on the hosts of the tests. Flux is real where $HPCTRAIN_TEST_FLUX names
its folder, and starts on these hosts; without it, `flux` is a stand-in.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import launches
import pytest

from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

RUN = [launches.PYTHON, "-m", "hpctrain", "run"]
PATIENCE = 120
# Read here, as a test gets none of hpctrain's variables.
REAL_FLUX = os.environ.get("HPCTRAIN_TEST_FLUX", "")
SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "WORD")
print(json.dumps([os.uname().nodename, *map(os.environ.get, names)]))
server = open("/proc/%d/stat" % os.getppid()).read()
launcher = server.rpartition(")")[2].split()[1]
print("arguments", " ".join(open("/proc/%s/cmdline" % launcher).read().split(chr(0))))
sys.exit(3 if os.environ.get("FAILS") == os.environ["RANK"] else 0)
"""


@pytest.fixture
def program():
    """Return the name of a program that prints its place, in the folder of this test."""
    Path("show.py").write_text(SHOW)
    return "show.py"


def pbs(*hosts):
    """Return the variables of a batch script of PBS."""
    Path("nodes").write_text("".join(f"{host}\n" for host in hosts))
    return {"PBS_JOBID": "12.server", "PBS_NODEFILE": os.path.abspath("nodes")}


def places(output):
    """Return what each rank has printed, in the order of the ranks."""
    lines = [line.split(": ", 1)[-1] for line in output.splitlines()]
    return sorted((json.loads(line) for line in lines if line[0] == "["), key=lambda row: row[1])


@pytest.mark.slurm
@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_mpirun_starts_the_ranks_on_all_hosts_of_a_pbs_job(
    cluster, ssh, lacking, tmp_path, program, kind
):
    real = shutil.which(f"mpirun.{kind}")
    if real is None:
        lacking(kind, f"no mpirun.{kind} here")
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    mpirun.chmod(0o755)
    env = {**ssh, **pbs("node1", "node1", "node2", "node3"), "WORD": "hidden", "FAILS": "2"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env["PATH"] = f"{mpirun.parent}:{env['PATH']}"
    done = subprocess.run(
        cluster.command([*RUN, program], "node1"), cwd=tmp_path, env=env, timeout=PATIENCE,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert places(done.stdout) == [
        ["node1", "0", "4", "0", "0", "hidden"],
        ["node1", "1", "4", "1", "0", "hidden"],
        ["node2", "2", "4", "0", "1", "hidden"],
        ["node3", "3", "4", "0", "2", "hidden"],
    ], done
    assert "hidden" not in "".join(line for line in done.stdout.splitlines() if "argu" in line)
    assert "hpctrain: rank 2 on node2 failed first, with exit code 3" in done.stderr
    assert done.returncode == 3
    assert not list(tmp_path.glob("runs/*/.attempts*"))


def test_pbs_job_of_one_host_needs_no_mpirun(program):
    env = launches.environ(**pbs("a", "a"), PATH="/nowhere")
    done = subprocess.run(
        [*RUN, "--nproc-per-node", "2", program], env=env, timeout=PATIENCE, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert [row[1:3] for row in places(done.stdout)] == [["0", "2"], ["1", "2"]], done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "HT211"),
        (("--max-restarts", "1"), "--max-restarts outside of a Slurm batch script"),
        (("--nproc-per-node", "1,1,1"), "--nproc-per-node 1,1,1 (nodes: 2)"),
    ],
)
def test_pbs_job_is_refused_without_mpirun_or_with_wrong_options(program, options, text):
    env = launches.environ(**pbs("a", "b"), PATH="/nowhere")
    done = subprocess.run(
        [*RUN, *options, program], env=env, timeout=PATIENCE, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert text in done.stderr
    assert done.stderr.count("hpctrain: error: ") == 1


FLUX = """#!/usr/bin/env python3
import os, subprocess, sys
if sys.argv[1:] == ["hostlist", "--expand", "local"]:
    print("a b c")
    sys.exit()
options = "run --nodes 3 --ntasks 3 -o cpu-affinity=off -o gpu-affinity=off".split()
assert sys.argv[1:10] == options, sys.argv
tasks = [
    subprocess.Popen(sys.argv[10:], env={
        **os.environ, "FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": "3", "FLUX_TASK_LOCAL_ID": "0",
        "FLUX_JOB_NNODES": "3", "FLUX_JOB_ID": "f1", "HPCTRAIN_HOSTNAME": "abc"[rank],
    })
    for rank in range(3)
]
sys.exit(max([task.wait() for task in tasks]))
"""


def test_flux_starts_an_agent_on_each_host(tmp_path, program):
    (tmp_path / "flux").write_text(FLUX)
    (tmp_path / "flux").chmod(0o755)
    env = launches.environ(
        FLUX_URI="local:///run/x",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        HPCTRAIN_MAIN_ADDRESS="127.0.0.1",  # the hosts are one
    )
    done = subprocess.run(
        [*RUN, "--nproc-per-node", "2,1,1", program], env=env, timeout=PATIENCE,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [row[1:5] for row in places(done.stdout)] == [
        ["0", "4", "0", "0"],
        ["1", "4", "1", "0"],
        ["2", "4", "0", "1"],
        ["3", "4", "0", "2"],
    ], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("listed", ["batch1 1 a 42", "a 1 b 1 c 1"])
def test_run_in_a_job_of_lsf_with_several_hosts_names_the_launchers(program, listed):
    env = launches.environ(LSB_JOBID="12", LSB_MCPU_HOSTS=listed)
    done = subprocess.run(
        [*RUN, program], env=env, timeout=PATIENCE, capture_output=True, text=True, check=False
    )
    assert "HT211" in done.stderr
    assert f"an LSF job with {len(listed.split()) // 2} nodes" in done.stderr
    assert "jsrun hpctrain run SCRIPT" in done.stderr
    assert (done.stdout, done.returncode) == ("", 2)


def test_run_in_a_job_of_lsf_with_one_host_starts_the_ranks(program):
    env = launches.environ(LSB_JOBID="12", LSB_MCPU_HOSTS="a 4")
    done = subprocess.run(
        [*RUN, "--nproc-per-node", "2", program], env=env, timeout=PATIENCE, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert [row[1:3] for row in places(done.stdout)] == [["0", "2"], ["1", "2"]], done.stderr


# Slurm starts the instance of Flux that a job is submitted to.
OUTER = """#!/bin/bash
unset ${!SLURM_@}
id=$(flux batch job.sh) || exit
flux job attach $id
code=$?
cat log
exit $code
"""


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("fails", ["", "2"])
def test_rendered_job_of_flux_starts_the_ranks_on_all_its_hosts(
    cluster, lacking, tmp_path, program, fails
):
    if not REAL_FLUX:
        lacking("flux", "$HPCTRAIN_TEST_FLUX does not name its folder")
    spec = JobSpec(
        command=[launches.PYTHON, program], nodes=3, tasks_per_node=2, time="2m", output="log",
        environment={"PYTHONPATH": str(launches.TOP), "FAILS": fails, "WORD": "hidden"},
    )  # fmt: skip
    (tmp_path / "job.sh").write_text(render(spec, scheduler="flux"))
    (tmp_path / "outer.sh").write_text(OUTER)
    env = launches.on_cluster(cluster)
    env["PATH"] = f"{REAL_FLUX}/bin:{env['PATH']}"
    # The name of a host is 127.0.1.1 on itself, which Flux would tell the others.
    start = [f"{REAL_FLUX}/bin/flux", "start", "-Stbon.interface-hint=eth0", "bash", "outer.sh"]
    done = cluster.run(["srun", "-N3", "-n3", "--mpi=pmi2", *start], env=env, timeout=PATIENCE)
    assert places(done.stdout) == [
        [f"node{rank // 2 + 1}", str(rank), "6", str(rank % 2), str(rank // 2), "hidden"]
        for rank in range(6)
    ], done
    assert ("rank 2 on node2 failed first, with exit code 3" in done.stdout) == bool(fails), done
    assert done.returncode == (3 if fails else 0), done
