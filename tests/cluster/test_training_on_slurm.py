"""The example, unchanged, on four hosts of a real Slurm, over the network between them."""

import contextlib
import json
import time
from pathlib import Path

import launches
import pytest

pytestmark = pytest.mark.slurm
SRUN = ["srun", "--kill-on-bad-exit=1"]


def test_srun_on_two_hosts_has_the_losses_of_one_process(
    cluster, reproducibility_reference, tmp_path
):
    done = cluster.run(
        [*SRUN, "-N2", "-n3", launches.PYTHON, launches.TWICE, *launches.PARITY],
        cwd=tmp_path,
        env={**cluster.environ(), "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    launches.same_losses(tmp_path, reproducibility_reference)
    world = json.loads((tmp_path / "fp64" / "run.json").read_text())["world"]
    assert (world["launcher"], world["world_size"]) == ("slurm", 3)
    assert world["hosts"] == list(cluster.hosts[:2])


@pytest.fixture
def checkout(tmp_path):
    """Return a folder that looks like the top of the repository, for scripts that write into it."""
    for name in ("sbatch", "examples"):
        (tmp_path / name).symlink_to(launches.TOP / name)
    return tmp_path


def submit(cluster, folder, *arguments):
    """Submit a job and wait for its end; return its number, exit code and log."""
    env = cluster.environ()
    env["PATH"] = f"{launches.BIN}:{env['PATH']}"
    job, code = cluster.batch(arguments, seconds=400, cwd=folder, env=env)
    log = "".join(path.read_text() for path in folder.glob(f"*{job}.*"))
    return job, code, log


@pytest.mark.slow
def test_sbatch_mnist_trains_the_digits_on_four_hosts(cluster, checkout):
    job, code, log = submit(cluster, checkout, "--cpus-per-task=1", "sbatch/mnist.sh")
    assert code == 0, log
    assert (checkout / f"mnist-{job}.log").is_file()
    run = checkout / "runs" / f"mnist-{job}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["world_size"] == 4
    assert summary["metrics"]["top1"] >= 0.9
    assert not list((checkout / "runs").glob(".exit-status*"))


@pytest.mark.slow
def test_sbatch_language_model_divides_a_gpt_among_three_hosts(cluster, checkout):
    """Submit the job with a small model, on hosts without GPUs."""
    (checkout / "docs").symlink_to(launches.TOP / "docs")
    hosts = ("--gpus-per-node=0", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=1")
    small = ("--context", "32", "--width", "64", "--layers", "2", "--lr", "1e-2")
    steps = ("--max-steps", "60", "--warmup", "10", "--eval-every", "30")
    job, code, log = submit(cluster, checkout, *hosts, "sbatch/language_model.sh", *small, *steps)
    assert code == 0, log
    run = checkout / "runs" / f"language_model-{job}"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["backend"]) == ("done", 3, "fsdp")
    assert summary["metrics"]["eval_loss"] < 3.2  # of 4.9 for characters that are drawn at random
    assert "fsdp gathers the weights of one of 2 Block at a time" in log


@pytest.mark.slow
def test_sbatch_wrong_use_exits_with_code_2_and_its_message(cluster, checkout):
    _, code, log = submit(cluster, checkout, "sbatch/mnist.sh", "--backend", "none-such")
    assert code == 2
    assert "--backend" in log
    assert "Traceback" not in log


# As if one host lacks a package: rank 3 fails while the others wait for it in the rendezvous.
ABSENT = """
import os, pathlib, time
import hpctrain
if os.environ["RANK"] == "3":
    while not all(pathlib.Path(f"there-{rank}").exists() for rank in range(3)):
        time.sleep(0.1)
    raise ImportError("no such package here")
pathlib.Path("there-" + os.environ["RANK"]).touch()
with hpctrain.Session(batch_size=1):
    pass
"""


@pytest.mark.slow
def test_rank_that_fails_before_the_rendezvous_ends_the_job(cluster, tmp_path):
    """The other ranks are ended by SIGTERM; this must not requeue the job."""
    (tmp_path / "train.py").write_text(ABSENT)
    script = (launches.TOP / "sbatch" / "mnist.sh").read_text().partition("exec ")[0]
    (tmp_path / "job.sh").write_text(f"{script}exec hpctrain run train.py\n")
    job, code, log = submit(cluster, tmp_path, "job.sh")
    assert code not in (0, 75), log
    assert "no such package here" in log
    assert cluster.job(job)["Restarts"] == "0"


# Every rank writes its host and process id, and rank 1 the time of its death.
DIES = """
import json, os, pathlib, socket, sys, time
import hpctrain
with hpctrain.Session(batch_size=1) as session:
    rank = session.world.rank
    pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
    session.sum(1)
    if rank == 1:
        pathlib.Path("died").write_text(str(time.time()))
        os.kill(os.getpid(), 9)
    session.sum(1)
"""


def processes_of(script):
    """Return the ids of the processes that run a script, on this machine and its hosts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(script).encode() in words and b"srun" not in words[0]:
                found.append(path.parent.name)
    return found


@pytest.mark.slow
def test_killed_rank_ends_the_step_within_a_minute_and_no_rank_survives(cluster, tmp_path):
    """Run without Slurm's --kill-on-bad-exit: the ranks themselves detect the lost rank."""
    script = tmp_path / "train.py"
    script.write_text(DIES)
    command = ["srun", "--kill-on-bad-exit=0", "-N3", "-n3", launches.PYTHON, script]
    done = cluster.run(command, cwd=tmp_path, timeout=240)
    seconds = time.time() - float((tmp_path / "died").read_text())
    assert done.returncode != 0
    assert seconds < 60
    assert sorted(path.name for path in tmp_path.glob("pid-*")) == ["pid-0", "pid-1", "pid-2"]
    assert not processes_of(script)
    for rank in (0, 2):
        assert f"hpctrain: error: rank {rank} lost another rank: " in done.stderr
    # The last rank may report the other one, which ends first.
    assert "is node2, with rank 1)" in done.stderr
    assert "task 1: Killed" in done.stderr
    assert "Traceback" not in done.stderr
