"""Slurm with accounting: unknown accounts are refused, sacct has the exit codes of old jobs."""

import time
from pathlib import Path

import accounting
import launches
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

HPCTRAIN = (launches.PYTHON, "-m", "hpctrain")
# Slurm removes old jobs from its memory once a minute.
FORGETS = 150
WAIT = """
import os, sys
from hpctrain.jobs import job_watching
outcomes = job_watching.wait(sys.argv[1], os.environ, print)
print(outcomes)
sys.exit(job_watching.worst(outcomes))
"""


@pytest.fixture(scope="module")
def accounted_cluster(lacking):
    if missing := accounting.missing():
        lacking("slurm", missing)
    started = accounting.AccountedCluster()
    started.start()
    yield started
    started.stop()


@pytest.fixture
def hpctrain(accounted_cluster, tmp_path):
    Path("leaves.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")

    def run(*words, **variables):
        env = {**accounted_cluster.environ(), "HOME": str(tmp_path), **variables}
        return accounted_cluster.run([*HPCTRAIN, *words], env=env)

    return run


def exit_with(code):
    return ("--", launches.PYTHON, "leaves.py", str(code))


@pytest.mark.parametrize(
    ("option", "message", "fix"),
    [
        ("--account", "that may use the partition and the qos: root, physics", "--account NAME"),
        ("--qos", "a qos of the account's: normal", "--qos NAME"),
    ],
)
def test_submit_refuses_unknown_account_and_qos(hpctrain, option, message, fix):
    done = hpctrain("submit", option, "nobody", *exit_with(0))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert f"  fix:      {fix} (it is nobody; " in done.stderr


def test_jobs_use_the_account_of_the_shell(accounted_cluster, hpctrain):
    done = hpctrain("submit", "--wait", *exit_with(0), SBATCH_ACCOUNT="root")
    assert done.returncode == 0, done.stderr
    account = accounted_cluster.run(
        ["sacct", "-nPX", "--format=Account", "-j", done.stdout.strip()], check=True
    )
    assert account.stdout == "root\n"
    words = ("submit", "--wait", "--account", "physics", *exit_with(3))
    own = hpctrain(*words, SBATCH_ACCOUNT="root")
    assert own.returncode == 3, own.stderr


def test_exit_code_of_forgotten_job_comes_from_sacct(accounted_cluster, hpctrain):
    def submit(*words):
        return hpctrain("submit", *words).stdout.strip()

    jobs = {code: submit("--no-requeue", *exit_with(code)) for code in (0, 3, 75)}
    array = submit("--sweep", "code=1", *exit_with(4))
    cancelled = submit("--extra", "hold", *exit_with(0))
    accounted_cluster.run(["scancel", cancelled], check=True)
    end = time.monotonic() + FORGETS
    while accounted_cluster.run(["squeue", "-h", "--states=all", "-o", "%i"]).stdout.strip():
        assert time.monotonic() < end
        time.sleep(1)
    for label, code, word in (
        (jobs[0], 0, "COMPLETED"),
        (jobs[3], 3, "FAILED"),
        (jobs[75], 75, "FAILED"),
        (cancelled, 1, "CANCELLED"),
    ):
        done = accounted_cluster.run([launches.PYTHON, "-c", WAIT, label])
        assert done.returncode == code, done.stderr
        assert f"'{word}'" in done.stdout
    done = accounted_cluster.run([launches.PYTHON, "-c", WAIT, array])
    assert done.returncode == 4, done.stdout
    assert f"'{array}_0'" in done.stdout
    done = hpctrain("status", jobs[3])
    # Without a Session, nothing is in the run directory, so it was removed.
    assert done.stdout.splitlines()[1].split() == [jobs[3], "failed", "exit", "code", "3"]


@pytest.mark.parametrize(
    ("limit", "reason", "words", "option"),
    [
        (["qos", "normal", "set", "MaxJobsPerUser={}"], "QOSMaxJobsPerUserLimit",
         "a limit of the qos", "--qos normal"),
        (["account", "physics", "set", "GrpJobs={}"], "AssocGrpJobsLimit",
         "a limit of your account", "--account physics"),
    ],
)  # fmt: skip
def test_status_names_the_limit_that_a_job_meets(
    accounted_cluster, hpctrain, limit, reason, words, option
):
    def modify(number):
        command = [word.format(number) for word in limit]
        accounted_cluster.run(["sacctmgr", "--immediate", "modify", *command], check=True)

    modify(1)
    try:
        command = ["sbatch", "--parsable", "--account=physics", "--wrap=sleep 300"]
        numbers = [accounted_cluster.run(command, check=True).stdout.strip() for _ in range(2)]
        deadline = time.monotonic() + 60
        while reason not in (shown := hpctrain("status", numbers[1]).stdout):
            assert time.monotonic() < deadline, shown
        assert words in shown
        assert f"  options:  {option} (squeue)" in shown
    finally:
        modify(-1)
        accounted_cluster.clear()
