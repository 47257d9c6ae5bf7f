"""Why jobs wait, on a real Slurm."""

import launches
import pytest
from processes import until

pytestmark = [pytest.mark.slow]

HPCTRAIN = (launches.PYTHON, "-m", "hpctrain")


@pytest.fixture
def hpctrain(cluster, tmp_path):
    def run(*words):
        env = {**cluster.environ(), "HOME": str(tmp_path)}
        return cluster.run([*HPCTRAIN, *words], env=env)

    yield run
    cluster.clear()


@pytest.fixture
def sbatch(cluster):
    def submit(*options):
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 600"]
        return cluster.run(command, check=True).stdout.strip()

    return submit


@pytest.fixture
def changed(cluster):
    """Return a function that changes a node or a partition; undo it at the end."""
    undo = []

    def change(entity, *values, back):
        cluster.run(["scontrol", "update", entity, *values], check=True)
        undo.append(["scontrol", "update", entity, *back])

    yield change
    for command in undo:
        cluster.run(command, check=True)


def test_status_tells_why_each_job_waits(cluster, hpctrain, sbatch, changed):
    """Produce Slurm's reasons; status has the reason in words, the options, and what is sooner."""
    changed("PartitionName=patient", "MaxTime=10", back=["MaxTime=INFINITE"])
    first = sbatch("--nodes=2", "--exclusive", "--time=20")
    until(lambda: cluster.job(first)["JobState"] == "RUNNING")
    large = ["--nodes=4", "--exclusive", "--time=60"]
    jobs = {
        "Resources": (large, "waits for hosts to become free", "--nodes 4 --time 1:00:00"),
        "Priority": (large, "jobs with a higher priority are first", "--partition main"),
        "Dependency": ([f"--dependency=afterany:{first}"], "waits for the jobs of its dependency",
                       f"--dependency afterany:{first}(unfulfilled)"),
        "BeginTime": (["--begin=now+1hour"], "or for its --begin", ""),
        "JobHeldUser": (["--hold"], "held by you: scontrol release", ""),
        "PartitionTimeLimit": (["--partition=patient", "--time=60"],
                               "a longer time than its partition allows",
                               "--time 1:00:00 --partition patient; patient has 4 nodes of "),
    }  # fmt: skip
    numbers = {reason: sbatch(*options) for reason, (options, *_) in jobs.items()}

    def check(reason, words, options):
        until(lambda: cluster.job(numbers[reason])["Reason"].startswith(reason))
        shown = hpctrain("status", numbers[reason]).stdout
        assert words in shown, shown
        assert options in shown, shown
        assert "  waits:    since 20" in shown

    for reason, (_, words, options) in jobs.items():
        check(reason, words, options)
    assert "1 pending job of its partition has" in hpctrain("status", numbers["Priority"]).stdout
    # Last, as it changes the reason of the jobs that need all hosts.
    changed("NodeName=node4", "State=DRAIN", "Reason=test", back=["State=RESUME"])
    numbers["ReqNodeNotAvail"] = sbatch("--nodelist=node4")
    check("ReqNodeNotAvail", "hosts that it needs are down", "--nodelist node4 --time")


def test_status_tells_what_would_start_sooner(cluster, hpctrain, sbatch):
    first = sbatch("--nodes=2", "--exclusive", "--time=20")
    until(lambda: cluster.job(first)["JobState"] == "RUNNING")
    waits = sbatch("--nodes=4", "--exclusive", "--time=60")
    until(lambda: cluster.job(waits)["Reason"] == "Resources")
    shown = hpctrain("status", waits).stdout
    sooner = [line for line in shown.splitlines() if "sooner:" in line]
    assert any("--nodes=2: a new job would start at 20" in line for line in sooner), shown
    assert all(line.endswith("min sooner (sbatch --test-only)") for line in sooner)
    assert not any("--time" in line for line in sooner)  # the hosts are not free before
