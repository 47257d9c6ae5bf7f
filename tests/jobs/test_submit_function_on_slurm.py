"""`hpctrain.submit` on a real Slurm: functions and scripts on the ranks of a job, and results."""

import json
import time
from pathlib import Path

import faults
import launches
import pytest

from hpctrain import rundir

pytestmark = pytest.mark.slow

TESTS = str(Path(faults.__file__).parent)

# It must arrive unchanged, and run no code.
HOSTILE = "a'b\"c $(touch canary) `touch canary` \\ \n#SBATCH --hold\n; touch canary # ä%j\t*~!"

WORLDS = """
import json, os, sys
import hpctrain

def place(what, *, more):
    import glob, hashlib, os
    from dataclasses import asdict
    import hpctrain

    with hpctrain.Session(batch_size=1, start_timeout=60) as session:
        world, total = asdict(session.world), session.sum(what)
    secret = os.environ["HPCTRAIN_SECRET"].encode()
    seen = glob.glob("/proc/[0-9]*/cmdline") + glob.glob("runs/.submitit/*/*")
    leaks = [path for path in seen if os.path.exists(path) and secret in open(path, "rb").read()]
    print("printed by", world["rank"], more)
    return {
        "world": world, "total": total, "hostile": os.environ["HOSTILE"], "leaks": leaks,
        "secret": hashlib.sha256(secret).hexdigest(), "run": os.environ["HPCTRAIN_RUN_DIR"],
        "leak": os.environ.get("SBATCH_QOS"), "outer": os.environ["SLURM_JOB_ID"],
    }

if __name__ == "__main__":
    before = dict(os.environ)
    spec = hpctrain.JobSpec(
        nodes=2, tasks_per_node=2, cpus_per_task=1, time="5m", extra={"comment": "it's $(x) #1"},
        name=sys.argv[2],
        environment={"HOSTILE": sys.argv[1]},
    )
    job = hpctrain.submit(place, spec, args=(2,), kwargs={"more": "now"})
    results = job.results()
    print(json.dumps({
        "id": job.id, "state": job.state, "results": results, "run": str(job.run_dir),
        "again": str(hpctrain.jobs.find(job.id)), "job": str(job), "log": job.logs(3),
        "put back": dict(os.environ) == before, "inside": os.environ["SLURM_JOB_ID"],
    }))
"""


@pytest.fixture(autouse=True)
def clear_cluster(cluster):
    yield
    cluster.clear()


@pytest.fixture
def drive(cluster, tmp_path):
    """Return a function that runs a program on a host; it returns the JSON of the last line."""

    def drive(program, *arguments, before=(), **env):
        (tmp_path / "driver.py").write_text(program)
        done = cluster.run(
            [*before, launches.PYTHON, "driver.py", *arguments],
            cwd=tmp_path,
            env={**cluster.environ(), "OMP_NUM_THREADS": "1", **env},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert "sacct" not in done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return drive


def test_submit_function_over_two_hosts_from_inside_a_job(cluster, drive, tmp_path):
    name = 'it\'s "$(touch canary)" \\ %j #ä'
    output = drive(WORLDS, HOSTILE, name, before=("srun", "-N1", "-n1"), SBATCH_QOS="none")
    results = output["results"]
    assert [one["world"] for one in results] == [
        {
            "rank": rank,
            "world_size": 4,
            "local_rank": rank % 2,
            "local_world_size": 2,
            "node_rank": rank // 2,
            "num_nodes": 2,
            "hosts": ["node1", "node2"],
            "launcher": "slurm",
        }
        for rank in range(4)
    ]
    for one in results:
        assert (one["total"], one["hostile"]) == (8, HOSTILE)
        assert one["run"] == output["run"] == str(tmp_path / "runs" / f"{name}-{output['id']}")
        assert one["outer"] == output["id"] != output["inside"]
        assert (one["leak"], one["leaks"]) == (None, [])
    assert len({one["secret"] for one in results}) == 1
    assert output["state"] == "COMPLETED"
    assert output["again"] == output["job"]
    assert "printed by 3 now" in output["log"]
    assert output["put back"]
    assert not list(tmp_path.rglob("canary"))
    folder = tmp_path / "runs" / ".submitit"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cluster.job(output["id"])["Comment"] == "it's"  # and more in other fields of the line


ENDS = """
import json, os, sys, time
import hpctrain
from hpctrain.errors import HpctrainError

def fail():
    if os.environ["SLURM_PROCID"] == "2":
        raise RuntimeError("this rank has had enough")
    time.sleep(120)

def outcome(job):
    try:
        return job.result()
    except HpctrainError as error:
        return error.found

if __name__ == "__main__":
    spec = hpctrain.JobSpec(tasks_per_node=3, time="5m", name="three")
    activate = os.path.join(sys.prefix, "bin", "activate")
    own = hpctrain.JobSpec(time="5m", venv=sys.prefix if os.path.exists(activate) else "")
    jobs = {
        "failed": hpctrain.submit(fail, spec),
        "left": hpctrain.submit("folder/leaves.py", own, args=(sys.argv[1], 3)),
    }
    print(json.dumps({name: [job.id, outcome(job), job.state] for name, job in jobs.items()}))
"""

SCRIPT = """
import json, sys
import neighbour
assert __name__ == "__main__"
open(neighbour.NAME, "w").write(json.dumps(sys.argv))
sys.exit(int(sys.argv[-1]) if sys.argv[-1].isdigit() else 0)
"""


def test_submit_function_reports_how_jobs_end(cluster, drive, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "leaves.py").write_text(SCRIPT)
    (tmp_path / "folder" / "neighbour.py").write_text("NAME = 'left.json'\n")
    output = drive(ENDS, HOSTILE)

    number, reason, state = output["failed"]
    assert state == "FAILED"
    assert reason.startswith(f"rank 2 of 3 of job {number} failed:\nTraceback")
    assert reason.endswith("RuntimeError: this rank has had enough")

    number, reason, state = output["left"]
    assert state == "FAILED"
    assert "called sys.exit with 3" in reason
    assert cluster.job(number)["ExitCode"] == "3:0"
    assert json.loads(Path("left.json").read_text()) == [
        str(tmp_path / "folder" / "leaves.py"), HOSTILE, "3"
    ]  # fmt: skip
    assert not list(tmp_path.rglob("canary"))


SURVIVE = """
import json, sys
import hpctrain

def train(arguments):
    import survivor
    survivor.main(arguments)

if __name__ == "__main__":
    spec = hpctrain.JobSpec(
        nodes=3, tasks_per_node=1, time="10m", run_dir="run", partition=sys.argv[1],
        extra={"exclusive": True},
    )
    print(json.dumps(hpctrain.submit(train, spec, args=(sys.argv[2:],)).id))
"""
COME_BACK = """
import json, sys
import hpctrain
job = hpctrain.jobs.find(sys.argv[1])
print(json.dumps([job.results(), job.state, len(job.metrics())]))
"""


WHY = """
import json, sys
import hpctrain
try:
    hpctrain.jobs.find(sys.argv[1]).result()
except hpctrain.HpctrainError as error:
    print(json.dumps(str(error)))
"""


def wait_until_it_trains(cluster, number):
    ledger = Path("run/ledger-0.jsonl")
    end = time.monotonic() + 120
    while not ledger.exists() or len(ledger.read_text().splitlines()) < 4:
        assert time.monotonic() < end, cluster.job(number)
        time.sleep(0.05)


def test_submit_function_cancelled_job_stays_cancelled(cluster, drive):
    number = drive(SURVIVE, "main", *faults.OPTIONS, "--pace", "0.4", PYTHONPATH=TESTS)
    wait_until_it_trains(cluster, number)
    # The cancellation, and the signal at the time limit, which would requeue the job.
    cluster.run(["scancel", "--batch", "--signal=USR2", number], check=True)
    cluster.run(["scancel", number], check=True)
    reason = drive(WHY, number)
    assert f"job {number} ended as CANCELLED: it was cancelled" in reason
    cluster.ended(number)
    assert cluster.job(number)["JobState"] == "CANCELLED"
    assert cluster.job(number)["Restarts"] == "0"


@pytest.mark.parametrize("how", ["USR2", "preempted"])
def test_submit_function_stopped_job_resumes_bit_for_bit(cluster, drive, tmp_path_factory, how):
    partition = "patient" if how == "preempted" else "main"
    slow = ("--pace", "0.4", "--epochs", "2")
    number = drive(SURVIVE, partition, *faults.OPTIONS, *slow, PYTHONPATH=TESTS)
    wait_until_it_trains(cluster, number)
    if how == "USR2":  # the signal before the time limit
        cluster.run(["scancel", "--batch", "--signal=USR2", number], check=True)
    else:
        urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null")
        cluster.run(["sbatch", *urgent, "--wrap", "sleep 2"], check=True)
    undisturbed = faults.References(tmp_path_factory)(3, "--epochs", "2")  # while the job waits
    results, state, rows = drive(COME_BACK, number, PYTHONPATH=TESTS)
    assert (results, state) == ([None] * 3, "COMPLETED")
    assert cluster.job(number)["Restarts"] == "1"
    assert rows >= 16
    run = rundir.RunDirectory("run")
    assert [line["step"] > 3 for line in run.lines(run.starts)] == [False, True]
    faults.same(run.path, undisturbed)
    assert not list(Path("runs").glob(f".*-{number}-*")), "stop file or exit_status_file left"


LIMITED = """
import json, time
import hpctrain
from hpctrain.errors import HpctrainError

def sleep():
    time.sleep(600)

if __name__ == "__main__":
    job = hpctrain.submit(sleep, hpctrain.JobSpec(time="1m", signal_time=10))
    try:
        job.result()
    except HpctrainError as error:
        print(json.dumps([job.id, str(error)]))
"""


def test_submit_function_without_session_is_not_requeued_at_time_limit(cluster, drive):
    number, reason = drive(LIMITED)
    facts = cluster.job(number)
    assert (facts["JobState"], facts["Restarts"]) == ("TIMEOUT", "0")
    assert f"job {number} ended as TIMEOUT: it was still running at its time limit" in reason
