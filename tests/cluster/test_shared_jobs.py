"""One query to Slurm for all processes of a user that watch jobs."""

import os
import subprocess
import sys
from pathlib import Path

import fake_slurm
import pytest
from fake_slurm import job

from hpctrain.cluster import slurm
from hpctrain.cluster.slurm import shared_jobs
from hpctrain.cluster.slurm.shared_jobs import SharedJobs
from hpctrain.jobs import job_watching

OWN = {"UserID": str(os.getuid())}


@pytest.fixture
def fake(tmp_path):
    made = fake_slurm.FakeSlurm(tmp_path)
    made.jobs(job("70", **OWN))
    return made


@pytest.fixture
def asked(monkeypatch):
    """Return the times of queries by a clock that the test sets, and this clock."""
    times, clock = [], [1000.0]

    def jobs(env, **more):
        times.append(clock[0])
        return slurm.jobs(env, **more)

    monkeypatch.setattr(shared_jobs, "jobs", jobs)
    return times, clock


def test_twenty_waiting_submits_and_a_top_ask_twelve_times_in_a_minute(fake, asked, monkeypatch):
    times, clock = asked
    listing = slurm.jobs(fake.env)
    monkeypatch.setattr(shared_jobs, "jobs", lambda *_, **__: (times.append(clock[0]), listing)[1])
    readers = [SharedJobs(fake.env, lambda: clock[0]) for _ in range(21)]
    due = [1000.0 + number / 10 for number in range(21)]
    pauses = [job_watching._FIRST_PAUSE] * 20 + [5.0]
    while min(due) < 1060.0:
        number = due.index(min(due))
        clock[0] = due[number]
        listing_of_reader = readers[number].look()
        assert clock[0] - listing_of_reader.taken < 10
        due[number] += pauses[number]
        if number < 20:
            pauses[number] = min(pauses[number] * job_watching._GROWTH, job_watching._LONGEST_PAUSE)
    assert 6 <= len(times) <= 12


def test_one_process_alone_asks_each_time(fake, asked):
    times, clock = asked
    alone = SharedJobs(fake.env, lambda: clock[0])
    for number in range(3):
        fake.jobs(job("70", TimeUsed=f"0:{number}", **OWN))
        assert alone.look().jobs[0].used == f"0:{number}"
    other = SharedJobs(fake.env, lambda: clock[0])
    assert other.look().jobs == alone.look().jobs
    assert len(times) == 3
    clock[0] += 60  # the other one no longer looks
    alone.look()
    alone.look()
    assert len(times) == 5


def test_answer_of_a_process_that_has_ended_does_not_count(fake, asked):
    times, clock = asked
    ended = subprocess.Popen(["true"])
    ended.wait()
    first = SharedJobs(fake.env, lambda: clock[0])
    first._me = f"{ended.pid} first"
    first.look()
    SharedJobs(fake.env, lambda: clock[0]).look()
    assert len(times) == 2


def test_error_of_slurm_is_shared_and_forgotten(fake, asked):
    times, clock = asked
    fake.jobs(None)
    readers = [SharedJobs(fake.env, lambda: clock[0]) for _ in range(3)]
    for reader in readers:
        with pytest.raises(slurm.NoAnswerError, match="Unable to contact"):
            reader.look()
    assert len(times) == 1
    fake.jobs(job("70", **OWN))
    clock[0] += 8
    assert [len(reader.look().jobs) for reader in readers] == [1, 1, 1]
    assert len(times) == 2


def test_processes_of_another_cluster_have_an_answer_of_their_own(fake, asked):
    times, clock = asked
    SharedJobs(fake.env, lambda: clock[0]).look()
    other = {**fake.env, "SLURM_CONF": "/other/slurm.conf"}
    SharedJobs(other, lambda: clock[0]).look()
    assert len(times) == 2


@pytest.mark.parametrize("damage", ["missing", "shared", "link", "garbage", "other version"])
def test_without_a_private_folder_or_a_readable_file_each_process_asks(
    fake, asked, damage, tmp_path
):
    times, clock = asked
    own = tmp_path / "own"
    env = {**fake.env, "XDG_RUNTIME_DIR": str(own / "below" if damage == "missing" else own)}
    if damage == "link":
        own.symlink_to(fake.folder)
    elif damage != "missing":
        own.mkdir()
        own.chmod(0o777 if damage == "shared" else 0o700)
    first = SharedJobs(env, lambda: clock[0])
    first.look()
    for file in own.glob("hpctrain-jobs-*"):
        file.write_text({"garbage": "[", "other version": '{"jobs": [{"a": 1}]}'}[damage])
    assert SharedJobs(env, lambda: clock[0]).look().jobs[0].label == "70"
    assert len(times) == 2


def test_wait_does_not_end_by_an_answer_from_before_the_submission(fake, monkeypatch):
    fake.jobs()
    SharedJobs(fake.env).look()
    watched = job_watching._Watched("71", fake.env)
    fake.jobs(job("71", **OWN))
    assert watched.look() is None
    monkeypatch.setattr(shared_jobs, "_SECONDS", 0.0)
    assert set(watched.look()) == {"71"}


def test_processes_at_once_make_one_query(fake):
    (fake.folder / "squeue").rename(fake.folder / "real")
    fake.command("squeue", more=f'sleep 0.3; exec "{fake.folder}/real" "$@"')
    code = (
        "import os; from hpctrain.cluster.slurm.shared_jobs import SharedJobs\n"
        "print(SharedJobs(os.environ).look().jobs[0].label, flush=True); input()"
    )
    env = {**fake.env, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdin=pipe, stdout=pipe)
        for _ in range(3)
    ]
    # Each lives until all have an answer, as that of a process that has ended does not count.
    assert [process.stdout.readline() for process in processes] == [b"70\n"] * 3
    for process in processes:
        process.communicate(b"\n")
    assert fake.calls.read_text().count("squeue") == 1
