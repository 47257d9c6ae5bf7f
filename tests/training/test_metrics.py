"""Rows of metrics on a full disk, and consensus between ranks."""

import json
import os
import resource
import signal

import pytest
import torch

from hpctrain.backends.single import Single
from hpctrain.errors import GivenUpError
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.effective_time import EffectiveTime
from hpctrain.training.consensus import Consensus, on_rank_zero
from hpctrain.training.metrics import Metrics, table, trim


@pytest.fixture
def single():
    return Single(None, torch.device("cpu"), None)


@pytest.fixture
def limited_file_size():
    """Return a function that limits the size of files of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_metrics_on_a_full_disk_are_kept_and_no_line_is_cut(single, limited_file_size, caplog):
    directory = RunDirectory("run")
    trim(directory, 0)
    metrics = Metrics(single, directory, 0)
    metrics.write(1, 0, {"top1": 0.5})
    size = directory.metrics.stat().st_size
    limited_file_size(size + 20)
    for step in (2, 3):
        metrics.write(step, 0, {"top1": 0.5})
        assert directory.metrics.stat().st_size == size
    assert caplog.text.count("df -h") == 1
    limited_file_size(1 << 20)
    metrics.write(4, 0, {"top1": 0.5})
    metrics.close()
    text = directory.metrics.read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2, 3, 4]


def test_metrics_at_a_step(single):
    trim(RunDirectory("run"), 0)
    metrics = Metrics(single, RunDirectory("run"), 0)
    metrics.write(4, 0, {"top1": 0.5})
    metrics.write(4, 0, {"eval_loss": 2})
    assert metrics.at(4) == {"top1": 0.5, "eval_loss": 2.0}
    assert metrics.at(5) == {}
    metrics.close()


def test_consensus_reads_each_value_once(single):
    requests = []
    consensus = Consensus(single)

    def step():
        if not consensus.due(False):
            return None
        consensus.begin({"requests": float(requests.pop() if requests else 0)}, "")
        return consensus.read()[0]

    assert step() == {"requests": 0.0}
    requests.append(1)
    sums = [step() for _ in range(600)]
    assert [one["requests"] for one in sums if one].count(1.0) == 1
    assert consensus.read() is None


class LateSums:
    """A fake backend of two ranks, whose sums have not arrived yet."""

    world_size = 2

    def __init__(self):
        self.started = []

    def sum_async(self, numbers):
        self.started.append(list(numbers))
        return self

    def values(self):
        return [2 * number for number in self.started[-1]]


def test_metrics_sums_are_read_one_row_later():
    late, step = LateSums(), 0
    consensus = Consensus(late)
    read = {}
    for step in range(20):
        if consensus.due(False):
            sums = consensus.read()
            consensus.begin({"step": float(step)}, "", [1.0] * step)
            if sums is not None:
                read[step] = sums[0]["step"] / 2
                assert sums[1] == [2.0] * int(read[step])
    begins = [int(numbers[3]) for numbers in late.started]
    assert read == dict(zip(begins[1:], map(float, begins[:-1]), strict=True))


def test_means_of_deterministic_runs_are_added_in_the_order_of_the_ranks():
    """Another place in the message, as of a later row, must not change the last bit."""
    backend = Single(None, torch.device("cpu"), None)
    backend.rank, backend.world_size = 1, 3
    trim(RunDirectory("run"), 0)
    torch.use_deterministic_algorithms(True)
    try:
        metrics = Metrics(backend, RunDirectory("run"), 0)
        metrics.add({"loss": 0.2, "score": 4.0})
        metrics.end_step(1, 0)
        metrics.end_row()
        assert metrics.offer() == []
        metrics.accept([])
        sent = metrics.offer()
        metrics.accept([0.1, 0.2, 0.3, 0.3, 0.2, 0.1])
    finally:
        torch.use_deterministic_algorithms(False)
    assert sent == [0.0, 0.2, 0.0, 0.0, 4.0, 0.0]
    assert metrics.last["loss"] == (0.1 + 0.2 + 0.3) / 3
    assert metrics.last["score"] == (0.3 + 0.2 + 0.1) / 3
    assert metrics.last["loss"] != metrics.last["score"]


def test_metrics_error_on_rank_0_is_raised(single):
    def fail():
        raise GivenUpError.of_text("HT619", "three starts", "progress", "look")

    assert on_rank_zero(single, os.getpid) == os.getpid()
    with pytest.raises(GivenUpError, match="three starts"):
        on_rank_zero(single, fail)


@pytest.mark.parametrize(
    ("metrics", "score"),
    [
        ({"loss": 0.5, "top1": 0.75}, ("top-1", "0.7500")),
        ({"loss": 0.5, "accuracy": 0.75}, ("accuracy", "0.7500")),
        ({"loss": 0.5}, ("loss", "0.5000")),
        ({"generator_loss": 0.5}, None),
    ],
)
def test_table_at_the_end_has_only_rows_that_the_run_has(metrics, score, tmp_path):
    summary = {
        "metrics": metrics,
        "samples_per_second": 1000.0,
        "seconds": 2.0,
        "world_size": 1,
        "backend": "single",
        "precision": "fp32",
    }
    directory = RunDirectory(tmp_path)
    rows = [line.split(None, 1) for line in table(summary, "none", directory).splitlines()]
    assert rows == [
        *([[*score]] if score else []),
        ["samples/s", "1,000"],
        ["time", "2.0 s"],
        ["ranks", "1"],
        ["backend", "single (none)"],
        ["precision", "fp32"],
        ["run", str(tmp_path)],
    ]
    for step in (40, 1234):
        directory.checkpoint(step).mkdir(parents=True)
    effective = EffectiveTime(4000.0, 3600.0, {"start": 300.0, "redo": 100.0})
    more = table({**summary, "seconds": 3661.0}, "none", directory, effective, [("used", "2 h")])
    shown = dict(line.split(None, 1) for line in more.splitlines())
    assert len(shown) == len(rows) + 3
    assert shown["time"] == "1:01:01"
    assert shown["effective"] == "0.90 of 4000 s; lost: start 300.0 s, redo 100.0 s"
    assert shown["checkpoint"] == str(directory.checkpoint(1234))
    assert shown["used"] == "2 h"
