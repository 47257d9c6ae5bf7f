"""Faults by sbatch/acceptance/chaos.py; test_resume_on_slurm.py has them on Slurm."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import fake_slurm
import launches
import pytest
from fake_slurm import job

chaos = launches.load(launches.CHAOS)


def test_same_seed_gives_the_same_faults():
    one, same, other = (list(chaos.sequence(["kill", "segv"], 500, 20, n)) for n in (1, 1, 2))
    assert one == same
    assert one != other
    assert 17 < statistics.mean(fault.delay for fault in one) < 23
    assert 200 < sum(fault.kind == "kill" for fault in one) < 300


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    made.jobs(job("7", NodeList="node[1-2]", State="RUNNING"))
    made.command("srun", more='echo "$*" >>hurt; echo "rank 1, process 5"')
    return made


def test_ranks_of_a_job_are_hurt_on_its_hosts(slurm, capsys):
    chaos.main(["7", "--count", "3", "--mean", "0.01", "--kinds", "kill,stop"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["rank 1, process 5"] * 3
    with open("hurt") as calls:
        words = ("--jobid=7 --nodelist=node", f"{launches.CHAOS} --send SIG")
        assert all(word in call for call in calls for word in words)


def test_step_of_a_rank_is_cancelled_and_not_the_oldest_one(slurm, capsys):
    """Cancel step 4; Slurm still lists step 2, whose host is lost."""
    slurm.command("srun", more='echo "$*" >>hurt; printf 4')
    slurm.command("scancel", more='echo "$*" >>cancelled')
    chaos.main(["7", "--count", "1", "--mean", "0.01", "--kinds", "step"])
    assert capsys.readouterr().out.rstrip().endswith("step: 7.4")
    assert Path("cancelled").read_text().split()[-1] == "7.4"


def test_job_that_has_ended_is_left_alone(slurm, capsys):
    slurm.jobs(job("7", State="COMPLETED"))
    chaos.main(["7", "--count", "2", "--mean", "0.01"])
    assert capsys.readouterr().out == "the job has ended after 0 of 2 faults\n"


@pytest.mark.parametrize(
    "words", [["--kinds", "kill,none"], ["--count", "x"], ["--mean", "nan"], ["--mean", "-1"]]
)
def test_wrong_values(slurm, capsys, words):
    with pytest.raises(SystemExit) as caught:
        chaos.main(["7", *words])
    assert caught.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err


def test_slurm_that_does_not_answer_is_one_line(slurm, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="Slurm does not answer: no squeue"):
        chaos.main(["7", "--mean", "0.01"])


def test_rank_is_found_and_its_child_and_the_next_attempt_are_not(monkeypatch):
    env = {"SLURM_JOB_ID": "77"}

    def start(rank, attempt, code="import time; print(flush=True); time.sleep(60)", **more):
        environ = {
            **os.environ,
            **env,
            "HPCTRAIN_LOCAL_RANK": rank,
            "HPCTRAIN_START": attempt,
            **more,
        }
        environ["SLURM_STEP_ID"] = "3"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environ,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        process.stdout.readline()
        return process

    child = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        "'import time; print(flush=True); time.sleep(60)'])"
    )
    started = [
        *(start("0", "a/9"), start("1", "a/9", child)),
        *(start("0", "a/10"), start("2", "a/9", SLURM_JOB_ID="78")),
    ]
    try:
        assert chaos.ranks(env) == {0: started[0].pid, 1: started[1].pid}
        line = [sys.executable, launches.CHAOS, "--send", "step", "1"]
        environ = {**os.environ, **env, "SLURM_STEP_ID": "5"}
        done = subprocess.run(line, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "3\n")
    finally:
        for process in started:
            os.killpg(process.pid, 9)
            process.wait()
