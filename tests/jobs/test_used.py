"""hpctrain status --used: what a job has used, and the options that would have been enough."""

import json
import os
from pathlib import Path
from unittest import mock

import fake_slurm
import pytest
from fake_slurm import job

from hpctrain import cli
from hpctrain.cluster import slurm
from hpctrain.rundir import RunDirectory, used

GB = 1 << 30
HOSTS = ["node1", "node1", "node2"]


def line(memory=(1 * GB, 2 * GB, 2.5 * GB), **more):
    """Return a line of timings.jsonl: ten steps of about 0.1 s, of which a rank waited 0.01 s."""
    return {
        "step": 10, "epoch": 0, "time": 1.0, "steps": 10, "hosts": HOSTS, "data": [0.01] * 3,
        "forward": [0.02] * 3, "memory": list(memory), "gpu_memory": [0.0] * 3,
        "cores": [1.0, 1.5, 2.0], "gpu_use": [None] * 3,
        "step_times": {"100": 10}, **more,
    }  # fmt: skip


@pytest.fixture
def run():
    """Return a function that makes the run of job 70 with some lines."""

    def make(*lines):
        path = Path("runs/train-70")
        path.mkdir(parents=True, exist_ok=True)
        path.joinpath("run.json").write_text("{}")
        text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
        path.joinpath("timings.jsonl").write_text(text)
        return path

    return make


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    return made


def measure(path):
    directory = RunDirectory(path)
    return used.measure(directory.each(directory.timings))


def status(capsys, *words):
    assert cli.main(["status", *words]) == 0
    return [text.strip() for text in capsys.readouterr().out.splitlines()[3:]]


def test_used_of_a_job_that_is_done(fake, run, capsys):
    more = {"gpu_memory": [0, 3 * GB, 0], "gpu_use": [None, 0.8, 0.9], "cores": [0.5, 0.5, 3.1]}
    run(line(), line(memory=[1.5 * GB, 1 * GB, 1 * GB], **more))
    fake.jobs(
        job("70", State="COMPLETED", TimeUsed="1:12:00", TimeLeft="0:00", WorkDir=os.getcwd())
    )
    fake.command("sacct", "\n512000K\n3.5G\n")
    assert status(capsys, "70", "--used") == [
        "used:     2.40 host hours: 2 × 1:12:00 (squeue)",
        "memory:   at most 3.50 GB of a task (sacct)",
        "memory:   at most 2.50 GB of a rank, rank 2 on node2; 3.50 GB of the ranks of a host "
        "(timings.jsonl)",
        "cores:    1.4 of a rank in the mean, 3.1 at most (timings.jsonl)",
        "GPU:      at most 3.0 GB, at work 85% of the time (timings.jsonl)",
        "data:     9% of the steps waited for (timings.jsonl)",
        "enough:   --time 01:30:00 --memory 5G --cpus-per-task 4 (a quarter more)",
    ]
    assert "used:" not in "".join(status(capsys, "70"))
    assert cli.main(["status", "--used"]) == 2


def test_used_as_json(fake, run, capsys):
    run(line())
    fake.jobs(job("70", State="COMPLETED", TimeUsed="1:12:00", WorkDir=os.getcwd()))
    fake.command("sacct", "512000K\n")
    assert cli.main(["status", "--used", "--json", "70"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["jobs"]
    assert entry["used"] == {
        "host_hours": 2.4,
        "memory_of_a_task": 512000 * 1024,
        "ranks": {
            "memory_of_ranks": [1 * GB, 2 * GB, 2.5 * GB],
            "memory_of_a_host": 3 * GB,
            "cores_of_a_rank": 1.5,
            "most_cores_of_a_rank": 2.0,
            "gpu_memory": None,
            "gpu_use": None,
            "data_wait": pytest.approx(0.0944, rel=0.01),
        },
        "enough": {"time": "01:30:00", "memory": "4G", "cpus_per_task": "3"},
    }


def test_used_of_a_job_that_was_started_again_advises_no_time(fake, run, capsys):
    run(line())
    fake.jobs(job("70", State="COMPLETED", RestartCnt="1", WorkDir=os.getcwd()))
    assert status(capsys, "70", "--used")[-1] == (
        "enough:   --memory 4G --cpus-per-task 3 (a quarter more)"
    )
    fake.jobs(job("70", State="TIMEOUT", WorkDir=os.getcwd()))
    assert "--time" not in status(capsys, "70", "--used")[-1]


def test_used_of_a_run_without_a_job_and_without_figures(fake, run, capsys):
    path = run()
    assert measure(path) is None
    assert status(capsys, "train-70", "--used") == []


@pytest.mark.parametrize(
    "damage",
    [
        "no json\n",
        '{"memory": 3}\n',
        '{"hosts": ["a"], "memory": [NaN], "gpu_memory": [0], "steps": 1, "data": [0]}\n',
        {**line(), "memory": [1, 2]},
        {**line(), "step_times": {"x": 1}},
        {**line(), "step_times": {"9" * 9: 1}},
        {**line(), "cores": ["x", 1, 1]},
        {**line(), "gpu_use": 1},
        {**line(), "hosts": []},
    ],
)
def test_damaged_lines_are_left_out(run, damage):
    found = measure(run(damage, line(), damage))
    assert list(found.memory) == [1 * GB, 2 * GB, 2.5 * GB]
    assert found.on_a_host == 3 * GB
    assert found.data_wait == pytest.approx(0.0944, rel=0.01)


def test_launch_that_has_trained_nothing_has_used_nothing(run):
    directory = RunDirectory(run(line(time=5.0)))
    assert used.used_so_far(directory, mock.Mock(wall_seconds=1, lost_seconds={"queue": 0}), True)
    assert used.used_so_far(directory, mock.Mock(), False, since=6.0) == []


def test_only_the_ranks_of_the_last_start_count(run):
    one = {"data": [0.0], "gpu_memory": [0.0], "cores": [9.0], "gpu_use": [1.0]}
    other = line(memory=[9 * GB], hosts=["node7"], **one)
    found = measure(run(other, line()))
    assert (found.on_a_host, found.cores, found.gpu_use) == (3 * GB, (1.5, 2.0), None)


def test_lines_of_an_older_version_have_fewer_columns(run):
    older = {name: value for name, value in line().items() if name not in ("cores", "gpu_use")}
    found = measure(run(older))
    assert (found.on_a_host, found.cores, found.gpu_use) == (3 * GB, None, None)
    assert used.enough(found, 30 * 3600) == {"--time": "1-13:30:00", "--memory": "4G"}


@pytest.mark.parametrize(
    ("output", "size"), [("", 0), ("\n\n", 0), ("100K\n2M\n", 2 << 20), ("17\n", 17), ("x\n", 0)]
)
def test_largest_memory_of_a_job_in_accounting(fake, output, size):
    fake.command("sacct", output)
    assert slurm.largest_memory("70", fake.env) == size
