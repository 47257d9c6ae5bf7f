"""A Slurm that keeps accounts: who may submit, and what became of jobs that it has forgotten."""

import time
from pathlib import Path

import accounting
import launches
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

HPCTRAIN = (launches.PYTHON, "-m", "hpctrain")
# Slurm looks for jobs to forget once a minute.
FORGETS = 150
WAIT = """
import os, sys
from hpctrain.jobs import waiting
outcomes = waiting.wait(sys.argv[1], os.environ, print)
print(outcomes)
sys.exit(waiting.worst(outcomes))
"""


@pytest.fixture(scope="module")
def accounted(lacking):
    if missing := accounting.missing():
        lacking("slurm", missing)
    started = accounting.AccountedCluster()
    started.start()
    yield started
    started.stop()


@pytest.fixture
def hpctrain(accounted, tmp_path):
    Path("leaves.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")

    def run(*words):
        env = {**accounted.environ(), "HOME": str(tmp_path)}
        return accounted.run([*HPCTRAIN, *words], env=env)

    return run


def leaves(code):
    return ("--", launches.PYTHON, "leaves.py", str(code))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--account", "an account that may use the partition and the qos: root, physics"),
        ("--qos", "a qos of the account's"),
    ],
)
def test_submit_refuses_unknown_account_and_qos(hpctrain, option, says):
    done = hpctrain("submit", option, "nobody", *leaves(0))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert f"{option} (" in done.stderr


def test_site_write_lists_accounts_that_jobs_then_use(accounted, hpctrain, tmp_path):
    assert hpctrain("site", "--write").returncode == 0
    text = (tmp_path / ".config" / "hpctrain" / "site.sh").read_text()
    assert "\nexport SBATCH_ACCOUNT=root\n# export SBATCH_ACCOUNT=physics\n" in text
    done = hpctrain("submit", "--wait", *leaves(0))
    assert done.returncode == 0, done.stderr
    shown = accounted.run(
        ["sacct", "-nPX", "--format=Account", "-j", done.stdout.strip()], check=True
    )
    assert shown.stdout == "root\n"
    own = hpctrain("submit", "--wait", "--account", "physics", *leaves(3))
    assert own.returncode == 3, own.stderr


def test_exit_code_of_forgotten_job_comes_from_sacct(accounted, hpctrain):
    def submit(*words):
        return hpctrain("submit", *words).stdout.strip()

    jobs = {code: submit("--no-requeue", *leaves(code)) for code in (0, 3, 75)}
    array = submit("--sweep", "code=1", *leaves(4))
    cancelled = submit("--extra", "hold", *leaves(0))
    accounted.run(["scancel", cancelled], check=True)
    end = time.monotonic() + FORGETS
    while accounted.run(["squeue", "-h", "--states=all", "-o", "%i"]).stdout.strip():
        assert time.monotonic() < end
        time.sleep(1)
    for label, code, word in (
        (jobs[0], 0, "COMPLETED"),
        (jobs[3], 3, "FAILED"),
        (jobs[75], 75, "FAILED"),
        (cancelled, 1, "CANCELLED"),
    ):
        done = accounted.run([launches.PYTHON, "-c", WAIT, label])
        assert done.returncode == code, done.stderr
        assert f"'{word}'" in done.stdout
    done = accounted.run([launches.PYTHON, "-c", WAIT, array])
    assert done.returncode == 4, done.stdout
    assert f"'{array}_0'" in done.stdout
    said = hpctrain("status", jobs[3])
    run = f"runs/leaves-{jobs[3]};"
    assert said.stdout.splitlines()[1].split() == [jobs[3], "failed", run, "exit", "code", "3"]
