"""sbatch/acceptance.sh on two hosts of a real Slurm, and the page that it makes."""

import re

import launches
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CHECKS = ["identity", "gpus", "all-reduce", "train", "kill", "resume", "preempt"]

# A python that moves the run directory of one host elsewhere for the doctor.
ELSEWHERE = """#!/bin/sh
case "$(hostname) $*" in
    "node2 -m hpctrain doctor"*) set -- "$@" --run-dir {elsewhere};;
{more}
esac
exec {python} "$@"
"""
# Short: a task that Slurm cannot cancel while it starts runs to its own end.
CANCELS = '*"examples/mnist.py"*) scancel $SLURM_JOB_ID; sleep 20;;'


@pytest.fixture
def checkout(tmp_path):
    """Return a folder that looks like the top of the repository, for scripts that write into it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("sbatch", "examples"):
        (folder / name).symlink_to(launches.TOP / name)
    return folder


def broken_python(tmp_path, more=""):
    """Return a folder with a python with which the doctor finds a problem on the second host."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(ELSEWHERE.format(elsewhere=elsewhere, python=launches.PYTHON, more=more))
    program.chmod(0o755)
    return program.parent


def accept(cluster, folder, tools, *arguments):
    """Run the script as a job to its end; return its number, exit code, page and log.

    Args:
        cluster: the Slurm.
        folder: in which it is submitted.
        tools: the folder with its `python`.
        arguments: for sbatch.
    """
    env = launches.on_cluster(cluster)
    env["PATH"] = f"{tools}:{env['PATH']}"
    command = ["--cpus-per-task=1", *arguments, "sbatch/acceptance.sh"]
    job, code = cluster.batch(command, cwd=folder, env=env)
    page = (folder / f"acceptance-{job}.txt").read_text()
    return job, code, page, (folder / f"acceptance-{job}.log").read_text()


def outcomes(page):
    """Return the outcome by check: pass, FAIL, begun (and not ended) or not reached."""
    return dict(re.findall(r"^\d  ([a-z-]+) +(pass|FAIL|begun|not reached)", page, re.MULTILINE))


def details(page, name):
    """Return the lines below the line of a check, up to the next check or the end."""
    return re.search(rf"^\d  {name} .*\n((?: {{5}}.*\n)*)", page, re.MULTILINE)[1]


def test_acceptance_job_passes_all_checks_on_two_hosts(cluster, checkout):
    job, code, page, log = accept(cluster, checkout, launches.BIN)
    assert outcomes(page) == dict.fromkeys(CHECKS, "pass"), page + log
    assert code == 0
    assert "PASSED: all 7 checks" in page
    assert "node[1-2], 2 ranks" in page
    assert re.search(r"Slurm [\d.]+, Python [\d.]+, torch [\d.]+, hpctrain [\d.]+", page)
    assert "2 ranks, each once" in details(page, "identity")
    assert "no GPUs in this job" in details(page, "gpus")
    assert re.search(r"exact .* over gloo", details(page, "all-reduce"))
    assert "rank 1 on node2 killed" in details(page, "kill")
    assert "node2: task 1: Killed" in details(page, "kill")
    assert "no process of the run remains" in details(page, "kill")
    metrics = details(page, "train").strip()
    assert "60 steps: loss" in metrics
    for name in ("resume", "preempt"):
        resumed = r"continued from its last checkpoint at step [1-5]\d\n"
        assert re.search(resumed, details(page, name))
        assert "top1 equal" in details(page, name)
    assert metrics in details(page, "preempt")
    assert "requeued by Slurm" in details(page, "preempt")
    assert cluster.job(job)["Restarts"] == "1"
    assert "Traceback" not in log


def test_acceptance_job_fails_where_a_check_fails(cluster, checkout, tmp_path):
    job, code, page, log = accept(cluster, checkout, broken_python(tmp_path), "--no-requeue")
    failed = {"all-reduce": "FAIL", "preempt": "FAIL"}
    assert outcomes(page) == {**dict.fromkeys(CHECKS, "pass"), **failed}, page + log
    assert code == 1
    assert "FAILED: 2 of 7 checks" in page
    assert "problem: shared directory (ranks 1)" in details(page, "all-reduce")
    assert "fix: --run-dir DIR" in details(page, "all-reduce")
    assert "fix: sbatch --requeue" in details(page, "preempt")
    assert cluster.job(job)["Restarts"] == "0"


def test_acceptance_job_cancelled_lists_checks_not_reached(cluster, checkout, tmp_path):
    job, code, page, log = accept(cluster, checkout, broken_python(tmp_path, CANCELS))
    first = {"identity": "pass", "gpus": "pass", "all-reduce": "FAIL", "train": "begun"}
    assert outcomes(page) == {**dict.fromkeys(CHECKS, "not reached"), **first}, page + log
    assert code != 0
    assert "NOT COMPLETE: 3 of 7 checks ended, 1 failed" in page
    known = cluster.job(job)
    assert (known["JobState"], known["Restarts"]) == ("CANCELLED", "0")


def test_acceptance_job_refuses_one_rank(cluster, checkout):
    env = launches.on_cluster(cluster)
    job, code = cluster.batch(["--nodes=1", "sbatch/acceptance.sh"], cwd=checkout, env=env)
    assert code == 2
    log = (checkout / f"acceptance-{job}.log").read_text()
    assert "sbatch --ntasks=2" in log
    assert not list(checkout.glob("*.txt"))
