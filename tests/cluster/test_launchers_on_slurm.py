"""Launchers under a real Slurm: nested launchers, and errors where the launcher is missing."""

import shutil

import launches
import pytest

pytestmark = pytest.mark.slurm

TRAIN = """
import hpctrain
with hpctrain.Session(batch_size=1, start_timeout=60) as session:
    world = session.world
    places = (world.rank, world.local_rank, world.local_world_size, world.hosts[world.node_rank])
    total = session.sum(world.rank + 1)
    # In one write: what mpirun reads at once it passes on at once.
    print(f"{world.launcher} {places} {world.hosts} {total} {session.allocation.job_id}\\n", end="")
"""
# Four tasks on three hosts are 2, 1, 1.
PLACES = [(0, 0, 2, "node1"), (1, 1, 2, "node1"), (2, 0, 1, "node2"), (3, 0, 1, "node3")]


def run_job(cluster, folder, *lines, options=("-N3", "-n4")):
    """Submit a batch script, wait for its end; return its number, exit code and log."""
    (folder / "train.py").write_text(TRAIN)
    script = folder / "job.sh"
    python = f"export PATH={launches.BIN}:$PATH OMP_NUM_THREADS=1"
    script.write_text("\n".join(["#!/bin/bash", python, *lines, ""]))
    number, code = cluster.batch([*options, "--output=%j.log", str(script)], cwd=folder)
    return number, code, (folder / f"{number}.log").read_text()


def check_ranks(log, launcher, number, places=PLACES):
    """Check that the log has each rank's place and the sum over all ranks."""
    hosts = tuple(dict.fromkeys(place[3] for place in places))
    total = sum(range(len(places) + 1))
    lines = sorted(line for line in log.splitlines() if line.startswith(f"{launcher} ("))
    assert lines == [f"{launcher} {place} {hosts} {total} {number}" for place in places], log


@pytest.mark.parametrize(
    ("command", "part", "launcher"),
    [
        ("mpirun.openmpi --allow-run-as-root -np 4", "openmpi", "openmpi"),
        ("mpirun.mpich -n 4", "mpich", "hydra"),
    ],
)
@pytest.mark.slow
def test_mpirun_in_a_job_has_ranks_on_all_hosts(
    cluster, tmp_path, lacking, command, part, launcher
):
    if shutil.which(command.split()[0]) is None:
        lacking(part, f"no {command.split()[0]} here")
    number, code, log = run_job(cluster, tmp_path, f"{command} python train.py")
    assert code == 0, log
    check_ranks(log, launcher, number)


@pytest.mark.parametrize(
    "command",
    [
        "srun hpctrain explain",
        "mpirun.openmpi --allow-run-as-root -np 4 hpctrain explain",
        "hpctrain run -m hpctrain explain",
    ],
    ids=["srun", "mpirun", "hpctrain run"],
)
@pytest.mark.slow
def test_explain_of_the_ranks_of_a_job_is_one_table(cluster, tmp_path, lacking, command):
    if shutil.which(command.split()[0]) is None and "mpirun" in command:
        lacking("openmpi", "no mpirun.openmpi here")
    _, code, log = run_job(cluster, tmp_path, command)
    assert code == 0, log
    assert log.count("launcher  ") == 1, log
    lines = [line.removeprefix("0: ") for line in log.splitlines()]
    rows = [line.split() for line in lines[lines.index("ranks:") + 2 :]]
    assert [
        (int(rank), int(local), host) for rank, host, _, local, *_ in rows if rank.isdigit()
    ] == [(rank, local, host) for rank, local, _, host in PLACES], log


TORCHRUN = (
    "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID "
    "--rdzv-endpoint=node1:29501"
)


@pytest.mark.slow
def test_srun_torchrun_is_one_training_and_standalone_agents_are_refused(cluster, tmp_path):
    number, code, log = run_job(
        cluster,
        tmp_path,
        f"srun -l {TORCHRUN} -- train.py && echo agents that know each other: done",
        "srun torchrun --standalone --nproc-per-node=1 -- train.py",
        options=("-N2", "-n2"),
    )
    assert code != 0
    before, _, after = log.partition("agents that know each other: done")
    lines = [line.partition(": ")[2] for line in before.splitlines() if ": torchrun (" in line]
    # torchrun numbers its agents in the order of their arrival.
    assert {line.split(") (")[0] for line in lines} in (
        {f"torchrun ({r}, {r % 2}, 2, '{host}'" for r, host in enumerate(order)}
        for order in (["node1"] * 2 + ["node2"] * 2, ["node2"] * 2 + ["node1"] * 2)
    ), before
    assert all(line.endswith(f" 10 {number}") for line in lines)
    assert f"2 tasks of a step of job {number} each started torchrun" in after
    assert "torchrun (" not in after


def test_python_without_srun_is_refused_with_the_corrected_line(cluster, tmp_path):
    number, code, log = run_job(
        cluster,
        tmp_path,
        "python train.py",
        "echo code $?",
        "HPCTRAIN_LAUNCHER=none python train.py",
    )
    assert code == 0, log
    refused, _, after = log.partition("code 2\n")
    assert f"this process trains alone, and 3 of the 4 tasks of job {number} are idle" in refused
    assert "fix:      put srun before the command: srun --kill-on-bad-exit=1 " in refused
    meant_line = "  or:       if this is intended: env HPCTRAIN_LAUNCHER=none COMMAND\n"
    assert f"python train.py\n{meant_line}" in refused
    assert "Traceback" not in refused
    check_ranks(after, "none", number, places=[(0, 0, 1, "node1")])


def test_python_in_the_shell_of_salloc_on_the_login_host_is_refused(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    lines = "python train.py 2>&1; echo code $?; hpctrain run train.py 2>&1"
    shell = f"export PATH={launches.BIN}:$PATH; {lines}"
    # A host that is not the first one of the cluster.
    done = cluster.run(["salloc", "-w", "node3", "-N1", "bash", "-c", shell], cwd=tmp_path)
    assert done.returncode == 0, done
    refused, _, after = done.stdout.partition("code 2\n")
    number = done.stderr.split("Granted job allocation ")[1].split()[0]
    assert f"this node is login, and job {number} has node3: " in refused
    assert "  fix:      hpctrain run train.py\n" in refused
    assert "Traceback" not in refused
    assert "none (" not in refused
    check_ranks(after, "hpctrain", number, places=[(0, 0, 1, "node3")])


@pytest.mark.slow
def test_gpus_that_torch_cannot_use_are_refused_once_and_can_be_hidden(cluster, tmp_path):
    number, code, log = run_job(
        cluster,
        tmp_path,
        "srun python train.py",
        "echo code $?",
        # As the message suggests; tasks of srun do not see an export before it.
        "srun env CUDA_VISIBLE_DEVICES= python train.py",
        options=("-N1", "-n2", "--gpus-per-node=2"),
    )
    assert code == 0, log
    refused, _, hidden = log.partition("code 2\n")
    assert refused.count("fix:") == 1
    assert f"GPUs of job {number} on this node (GPUs: 2)" in refused
    check_ranks(hidden, "slurm", number, places=[(r, r, 2, "node1") for r in range(2)])


SUBMIT = """
import sys, submitit

def train():
    import hpctrain
    with hpctrain.Session(batch_size=1, start_timeout=60) as session:
        world = session.world
        return world.launcher, world.rank, world.local_rank, world.num_nodes, session.sum(1)

if __name__ == "__main__":
    executor = submitit.AutoExecutor("jobs", cluster=sys.argv[1])
    nodes = {"nodes": 2} if sys.argv[1] == "slurm" else {}
    executor.update_parameters(timeout_min=5, tasks_per_node=int(sys.argv[2]), **nodes)
    for result in executor.submit(train).results():
        print(result)
"""


@pytest.mark.parametrize(
    ("where", "tasks", "places"),
    [
        ("slurm", 2, [("slurm", rank, rank % 2, 2, 4) for rank in range(4)]),
        ("local", 2, [("submitit", rank, rank, 1, 2) for rank in range(2)]),
    ],
)
@pytest.mark.slow
def test_submitit_starts_ranks_on_slurm_and_locally(cluster, tmp_path, where, tasks, places):
    (tmp_path / "submit.py").write_text(SUBMIT)
    done = cluster.run(
        [launches.PYTHON, "submit.py", where, str(tasks)],
        cwd=tmp_path,
        env={**cluster.environ(), "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # submitit returns results by rank, and warns that this Slurm has no accounting.
    lines = [line for line in done.stdout.splitlines() if line.startswith("(")]
    assert lines == [str(one) for one in places]
