"""Horovod on four hosts: by srun, by horovodrun over ssh, and after a host was lost."""

import contextlib
import json
import time

import launches
import pytest

from hpctrain.jobs import job_files
from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

pytestmark = pytest.mark.slurm

# 24 micro-batches, which 8, 6, 4, 3 and 2 ranks share evenly.
TRAIN = (
    *("--data", "digits", "--precision", "fp64", "--global-batch", "48", "--batch-size", "2"),
    *("--max-steps", "30", "--lr", "0.001", "--log-every", "1", "--checkpoint-every", "5"),
)
HOROVOD = ("--backend", "horovod", "--start-timeout", "120", *TRAIN)
# The example, slowed down so that a host can be lost during the run.
SLOW = """
import runpy, sys, time
import hpctrain

class Slow(hpctrain.Session):
    def step(self, loss):
        super().step(loss)
        time.sleep(0.02)

hpctrain.Session = Slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PATIENCE = 400
FEW = 10  # steps of a run without a fault


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Return the losses of one process, which accumulates."""
    folder = tmp_path_factory.mktemp("one-process")
    command = [launches.PYTHON, launches.EXAMPLE, *TRAIN, "--run-dir", "run"]
    done = launches.start(command, folder)
    assert done.returncode == 0, done.stderr
    return launches.losses(folder / "run")


def check_steps(run, reference, steps=30):
    """Check that the run took every step once, with the losses of one process."""
    rows = [row for row in launches.rows(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["loss"] for row in rows] == pytest.approx(reference[:steps], rel=1e-9)


def worlds(run):
    """Return the world of each start."""
    return [json.loads(line)["world"] for line in (run / "starts.jsonl").read_text().splitlines()]


def srun(cluster, folder, *options, env=None):
    command = [
        launches.PYTHON,
        launches.EXAMPLE,
        *HOROVOD,
        "--max-steps",
        str(FEW),
        "--run-dir",
        "run",
    ]
    done = cluster.run(
        ["srun", "--kill-on-bad-exit=1", *options, *command],
        cwd=folder,
        env={**cluster.environ(), "OMP_NUM_THREADS": "1", **(env or {})},
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_horovod_under_plain_srun_on_four_hosts(horovod, cluster, reference, tmp_path, ranks):
    """Starts without ssh and without MPI on the hosts."""
    run = srun(cluster, tmp_path, "-N4", f"-n{ranks}")
    check_steps(run, reference, FEW)
    (world,) = worlds(run)
    assert (world["world_size"], world["launcher"]) == (ranks, "slurm")
    assert world["hosts"] == list(cluster.hosts)


LAYOUTS = {
    "3+1": ("node1", "node1", "node1", "node2"),
    "4+1+1 cyclic": ("node1", "node2", "node3", "node1", "node1", "node1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_horovod_with_uneven_ranks_per_host(horovod, cluster, reference, tmp_path, layout):
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{host}\n" for host in LAYOUTS[layout]))
    ranks = str(len(LAYOUTS[layout]))
    options = ("-n", ranks, "--distribution=arbitrary")
    run = srun(cluster, tmp_path, *options, env={"SLURM_HOSTFILE": str(hosts)})
    check_steps(run, reference, FEW)
    assert worlds(run)[0]["world_size"] == int(ranks)


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like the top of the repository, for scripts that write into it."""
    for name in ("sbatch", "examples"):
        (tmp_path / name).symlink_to(launches.TOP / name)
    return tmp_path


def horovod_spec():
    return job_files.read(launches.TOP / "sbatch" / "horovod.toml")


def write_script(folder, **changes):
    """Write the script of sbatch/horovod.toml with changes; return the folder."""
    (folder / "sbatch").unlink()
    (folder / "sbatch").mkdir()
    script = render(JobSpec(**{**horovod_spec(), **changes}))
    (folder / "sbatch" / "horovod.sh").write_text(script)
    return folder


def submit(cluster, folder, env, *arguments):
    """Submit the batch script; return its job."""
    done = cluster.run(
        ["sbatch", "--parsable", "--cpus-per-task=1", "sbatch/horovod.sh", *arguments],
        cwd=folder,
        env=env,
    )
    assert done.stdout.strip(), done.stderr
    return done.stdout.strip()


def wait_for_job(cluster, folder, job):
    """Wait for the end of a job; return its exit code and log."""
    _, code = cluster.ended(job, PATIENCE)
    return code, (folder / f"horovod-{job}.log").read_text()


def wait(until, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.1)


OVER_SSH = ["horovodrun", "--gloo", "-np", "8", "-H", "node1:2,node2:2,node3:2,node4:2"]
WAYS = {
    "hpctrain run": {},
    "srun": {"launcher": "srun", "elastic": False},
    "horovodrun": {
        "launcher": "none",
        "elastic": False,
        "command": [*OVER_SSH, *horovod_spec()["command"]],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("by", WAYS)
def test_horovod_batch_script_has_eight_ranks_on_four_hosts(
    horovod, cluster, ssh, reference, checkout, by
):
    job = submit(cluster, write_script(checkout, **WAYS[by]), ssh, *TRAIN)
    code, log = wait_for_job(cluster, checkout, job)
    assert code == 0, log
    run = checkout / "runs" / f"horovod-{job}"
    check_steps(run, reference)
    assert (worlds(run)[0]["world_size"], worlds(run)[0]["num_nodes"]) == (8, 4)
    assert not list(run.glob(".launch-*"))


@contextlib.contextmanager
def power_off(cluster, host):
    """Power a host off for as long as the block lasts."""
    try:
        cluster.power_off(host)
        yield
    finally:
        cluster.power_on(host)
        cluster.run(["scontrol", "update", f"nodename={host}", "state=resume"])
        cluster.clear()


@pytest.mark.slow
def test_elastic_horovod_batch_script_continues_without_a_lost_host(
    horovod, cluster, ssh, reference, checkout
):
    """Check that the ranks start again after Slurm has marked the host as down."""
    (checkout / "slow.py").write_text(SLOW)
    command = ("python", "slow.py", *horovod_spec()["command"][1:])
    job = submit(cluster, write_script(checkout, command=command), ssh, *TRAIN, "--run-dir", "run")
    run = checkout / "run"
    wait((run / "checkpoints" / "step-00000005").exists)
    with power_off(cluster, "node3"):
        code, log = wait_for_job(cluster, checkout, job)
    assert code == 0, log
    check_steps(run, reference)
    assert [world["world_size"] for world in worlds(run)] == [8, 6]
    assert worlds(run)[1]["hosts"] == ["node1", "node2", "node4"]
