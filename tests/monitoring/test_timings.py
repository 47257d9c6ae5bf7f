"""Timings of the phases of a step, and the detection of slow ranks."""

import subprocess
import sys

import pytest
import torch

from hpctrain.monitoring.slow_ranks import slow_ranks
from hpctrain.monitoring.timings import Clock, Timings
from hpctrain.process.phases import BACKWARD, COMPUTING, EVALUATING, LOADING, PHASES
from hpctrain.rundir import RunDirectory


class Sums:
    """A fake backend, whose sums contain the values of the other ranks."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, others):
        self.others, self.world_size, self.arrived = others, len(others) + 1, True

    def sum_async(self, numbers):
        data, forward = numbers[0], numbers[self.world_size]
        self.sums = [data, *(one for one, _ in self.others)]
        self.sums += [forward, *(two for _, two in self.others)]
        self.sums += numbers[2 * self.world_size :]
        assert len(numbers) == len(self.sums) == 6 * self.world_size
        return self

    def ready(self):
        return self.arrived

    def values(self):
        return self.sums


class Loop:
    """A training loop whose clock the test sets."""

    def __init__(self, backend, path, micro_batches=1):
        self.seconds = [0.0] * len(PHASES)
        self.clock, self.directory = Clock(self.seconds), RunDirectory(path)
        hosts = [f"node{rank}" for rank in range(backend.world_size)]
        self.timings = Timings(backend, self.clock, hosts, self.directory, micro_batches)

    def steps(self, count, data=0.010, forward=0.020, rest=0.070):
        for _ in range(count):
            for phase, seconds in ((LOADING, data), (COMPUTING, forward), (BACKWARD, rest)):
                self.seconds[phase] += seconds
            self.timings.step()

    def lines(self):
        return self.directory.lines(self.directory.timings)


@pytest.fixture
def loop(tmp_path):
    return lambda others=(): Loop(Sums(others), tmp_path)


def test_timings_line_has_the_phases_of_a_step(loop):
    loop = loop([(0.001, 0.025)])
    loop.steps(1, data=9.0)  # the first step of a start, which takes longer
    loop.steps(8, rest=0.080)
    loop.seconds[EVALUATING] += 50
    loop.steps(2, data=0.110, rest=0.080)
    loop.timings.begin(11, 3)
    loop.timings.poll()
    (line,) = loop.lines()
    assert line.pop("time") > 0
    assert line.pop("memory")[0] > 10_000_000  # of this process
    assert line.pop("cores")[0] >= 0
    assert line == {
        "step": 11,
        "epoch": 3,
        "steps": 10,
        "hosts": ["node0", "node1"],
        "data": [pytest.approx(0.030), 0.001],
        "forward": [pytest.approx(0.020), 0.025],
        "gpu_memory": [0, 0],
        "gpu_use": [None, 0.0],
        "step_times": {"100": 8, "106": 2},  # 110 and 210 ms: 20 log10 of 110,000 and 210,000
    }
    loop.steps(4)
    loop.timings.finish(15, 3)
    assert [line["steps"] for line in loop.lines()] == [10, 4]


def test_timings_count_the_loader_processes_of_a_rank(loop):
    loop = loop()
    loop.steps(3)
    loop.timings.begin(3, 0)
    loop.timings.poll()
    code = "import time; kept = bytearray(b'x') * 10**8; print(flush=True); n = sum(range(10**7))"
    command = [sys.executable, "-S", "-c", f"{code}; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as loader:
        for _ in range(2):
            loader.stdout.readline()
        loop.steps(3)
        loop.timings.finish(6, 0)
        loader.kill()
    before, line = loop.lines()
    assert line["memory"][0] - before["memory"][0] > 90_000_000
    assert line["cores"][0] > 0


def test_timings_are_due_every_half_minute_of_training(loop):
    loop = loop()
    loop.steps(301)
    assert loop.timings.due()
    assert not loop.timings.due()
    loop.seconds[EVALUATING] += 100
    loop.steps(299)
    assert not loop.timings.due()
    loop.steps(2)
    assert loop.timings.due()


def test_timings_do_not_wait_for_a_reduction(loop):
    loop = loop([(0.0, 0.0)])
    loop.steps(3)
    loop.timings._backend.arrived = False
    loop.timings.begin(3, 0)
    loop.timings.poll()
    assert loop.lines() == []
    loop.timings._backend.arrived = True
    loop.timings.poll()
    assert [line["step"] for line in loop.lines()] == [3]


def test_slow_rank_is_logged_when_it_starts_and_ends(loop, caplog):
    caplog.set_level("INFO", logger="hpctrain")
    loop = loop([(0.010, 0.020), (0.050, 0.020), (0.010, 0.020)])
    for _ in range(3):
        loop.steps(300)
        loop.timings.begin(0, 0)
        loop.timings.poll()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "slow by waiting for data: rank 2 on node2, 50 ms a step, the median rank 10 ms "
        "(a step takes 100 ms); look at its disk"
    )
    assert "more --workers" in message
    caplog.clear()
    loop.timings._backend.others = [(0.010, 0.020), (0.010, 0.090), (0.010, 0.020)]
    loop.steps(300)
    loop.timings.finish(0, 0)
    well, slow = [record.getMessage() for record in caplog.records]
    assert slow.startswith("slow by the forward pass: rank 2 on node2, 90 ms a step, the median")
    assert well == "no longer slow by waiting for data: rank 2 on node2"


def test_slow_rank_is_not_logged_after_few_seconds(loop, caplog):
    loop = loop([(0.010, 0.020), (5.0, 0.020)])
    loop.steps(20)
    loop.timings.finish(20, 0)
    assert [line["data"][2] for line in loop.lines()] == [5.0]
    assert caplog.records == []


def test_timings_on_a_full_disk_warn_once(loop, caplog, tmp_path):
    loop = loop()
    loop.directory.timings.mkdir()
    for _ in range(2):
        loop.steps(300)
        loop.timings.begin(0, 0)
        loop.timings.poll()
    assert caplog.text.count("timings.jsonl cannot be written") == 1


@pytest.mark.parametrize(
    ("seconds", "a_step", "slow"),
    [
        ([0.010, 0.010, 0.041, 0.010], 0.100, [2]),
        ([0.010, 0.013, 0.011, 0.012], 0.100, []),  # less than 1.5 times the median
        ([0.0001, 0.0001, 0.0019], 0.010, []),  # less than 2 ms
        ([0.010, 0.010, 0.030], 1.000, []),  # little compared with the step
        ([0.050, 0.010], 0.100, [0]),
        ([0.0, 0.0, 0.0], 0.0, []),
        ([5.0], 0.100, []),
    ],
)
def test_slow_ranks_differ_from_the_median(seconds, a_step, slow):
    assert slow_ranks(seconds, a_step) == slow
