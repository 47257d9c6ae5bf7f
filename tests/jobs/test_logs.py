"""hpctrain logs: the log of a job, of one rank, and of a job that goes on."""

import os
import threading
from pathlib import Path

import fake_slurm
import pytest
from fake_slurm import job
from processes import until

from hpctrain import cli
from hpctrain.jobs import job_watching

LOG = b"0: one\n1: two\rthree\n1: four\n10: five\n1: six"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    Path("runs").mkdir()
    return made


def logs(capfdbinary, *words, code=0):
    """Run the command; return what it wrote to standard output, and the text of its messages."""
    assert cli.main(["logs", *words]) == code
    output, errors = capfdbinary.readouterr()
    return output, errors.decode()


def test_log_of_a_job_by_its_number_and_its_name(fake, capfdbinary):
    fake.jobs(job("70", WorkDir=os.getcwd()))
    Path("runs/train-70.log").write_bytes(LOG)
    for name in ("70", "train"):
        assert logs(capfdbinary, name) == (LOG, "")
    fake.jobs()
    Path("runs/train-70").mkdir()
    for name in ("70", "train-70", "runs/train-70"):  # Slurm has forgotten the job
        assert logs(capfdbinary, name) == (LOG, "")
    fake.jobs(None)
    output, errors = logs(capfdbinary, "train-70")
    assert output == LOG
    assert "Slurm does not answer" in errors


def test_lines_of_one_rank(fake, capfdbinary):
    fake.jobs(job("70", WorkDir=os.getcwd()))
    Path("runs/train-70.log").write_bytes(LOG)
    assert logs(capfdbinary, "70", "--rank", "1")[0] == b"two\rfour\nsix"
    assert logs(capfdbinary, "70", "--rank", "10")[0] == b"five\n"
    assert logs(capfdbinary, "70", "--rank", "7")[0] == b""


def test_lines_of_the_rank_that_has_failed(fake, capfdbinary):
    cause = b"hpctrain: rank 10 on node3 failed first, with exit code 1: ValueError: x\n"
    fake.jobs(job("70", WorkDir=os.getcwd(), State="FAILED", exit_code="256"))
    Path("runs/train-70.log").write_bytes(LOG + b"\n" + cause)
    assert logs(capfdbinary, "70", "--rank", "failed")[0] == b"five\n"
    Path("runs/train-70.log").write_bytes(LOG)
    _, errors = logs(capfdbinary, "70", "--rank", "failed", code=2)
    assert "--rank failed: no failed rank is known (1: six)" in errors
    assert "--rank -1" in logs(capfdbinary, "70", "--rank=-1", code=2)[1]


def test_log_of_a_forgotten_job_that_failed_before_its_run_began(fake, capfdbinary):
    fake.jobs()
    Path("runs/train-70.log").write_bytes(LOG)
    assert logs(capfdbinary, "70") == (LOG, "")
    assert cli.main(["status", "70"]) == 0
    assert "runs/train-70.log" in capfdbinary.readouterr()[0].decode()
    assert "neither a job nor a run" in logs(capfdbinary, "71", code=2)[1]


def test_log_of_a_run_without_a_job(fake, capfdbinary):
    fake.jobs()
    folder = Path("runs/first/logs")
    folder.mkdir(parents=True)
    Path("runs/first/run.json").write_text("{}")
    for rank in range(2):
        (folder / f"rank-{rank}.log").write_text(f"line of rank {rank}\n")
    for name in ("first", "runs/first"):
        assert logs(capfdbinary, name) == (b"line of rank 0\n", "")
    assert logs(capfdbinary, "first", "--rank", "1")[0] == b"line of rank 1\n"
    assert "No such file" in logs(capfdbinary, "first", "--rank", "2", code=2)[1]


def test_log_that_is_not_there_is_told(fake, capfdbinary):
    fake.jobs(
        job("70", State="PENDING", NodeList="", WorkDir=os.getcwd()),
        job("71_[0-3]", State="PENDING", NodeList="", WorkDir=os.getcwd()),
        job("72_1", WorkDir=os.getcwd()),
        job("72_2", WorkDir=os.getcwd()),
    )
    assert "no log of 70 (runs/train-70.log): the job waits" in logs(capfdbinary, "70", code=2)[1]
    assert "no log of 71_[0-3] (file name unknown)" in logs(capfdbinary, "71", code=2)[1]
    assert "72 matches several jobs: 72_1, 72_2" in logs(capfdbinary, "72", code=2)[1]
    assert "No such file" in logs(capfdbinary, "72_1", code=2)[1]


def test_log_is_followed_to_the_end_of_the_job(fake, capfdbinary, monkeypatch):
    """Follow a log that grows while the job runs; return the exit code of the job."""
    monkeypatch.setattr(job_watching, "_LOG_SECONDS", 0.05)
    monkeypatch.setattr(job_watching, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(job_watching, "_LAST_SECONDS", 0.1)
    log = Path("runs/train-70.log")
    fake.jobs(job("70", State="PENDING", NodeList="", WorkDir=os.getcwd()))
    codes = []
    follower = threading.Thread(
        target=lambda: codes.append(cli.main(["logs", "-f", "70", "--rank", "1"]))
    )
    follower.start()
    shown = b""

    def appeared(text):
        nonlocal shown
        shown += capfdbinary.readouterr().out
        return text in shown

    fake.jobs(job("70", WorkDir=os.getcwd()))
    log.write_bytes(b"0: one\n1: two\n")
    until(lambda: appeared(b"two\n"))
    with log.open("ab") as file:
        file.write(b"1: three\n0: four\n1: five")
    until(lambda: appeared(b"three\n"))
    fake.jobs(job("70", WorkDir=os.getcwd(), State="FAILED", exit_code="768"))
    follower.join(60)
    assert codes == [3]
    assert shown + capfdbinary.readouterr().out == b"two\nthree\nfive"
