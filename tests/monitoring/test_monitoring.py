"""Timings of steps, slow ranks, trackers, traces, and the progress bar of a run."""

import contextlib
import gzip
import itertools
import json
import logging
import os
import pty
import re
import select
import signal
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from battery import images, session, small_model
from torch import nn
from torch.utils.data import Dataset

from hpctrain.errors import UsageError
from hpctrain.monitoring import progress, timings, trackers
from hpctrain.monitoring.trackers import Tracker
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training.checkpoint_manager import CheckpointManager

_SLOW = 0.06


class Slow(Dataset):
    """Images that load slowly on one rank."""

    def __init__(self, seconds):
        self.images, self.seconds = images(240), seconds

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.images[index]


def train(slow_data=None, slow_forward=None, each=None, **options):
    """Train with a rank whose data or whose forward pass is slow; return the last step."""
    timings._SECONDS_BETWEEN_LINES, timings._LEAST_SECONDS = 0.5, 0.1
    with session(**{"global_batch": 6, "log_every": 2, "run_dir": "run", **options}) as opened:
        rank = opened.world.rank
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        batch = opened.batches.batch_size
        loader = opened.loader(Slow(_SLOW / batch if rank == slow_data else 0.0))
        with opened.run() as run:
            for _ in run.epochs():
                for inputs, targets in run.batches(loader):
                    if rank == slow_forward:
                        time.sleep(_SLOW)
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    opened.step(loss)
                    run.log(loss=loss)
                    if each is not None:
                        each(run.step - 1)
                run.log(top1=0.5)
        return run.step


def lines():
    run = RunDirectory("run")
    return run.lines(run.timings)


def test_slow_ranks_are_named_by_rank_and_host():
    slow = partial(train, slow_data=1, slow_forward=2, max_steps=24)
    ranks.values(ranks.run(3, slow, layout=(2, 1)))
    log = RunDirectory("run").log(0).read_text()
    assert "slow by waiting for data: rank 1 on node1" in log
    assert "slow by the forward pass: rank 2 on node2" in log
    found = lines()
    assert len(found) >= 2
    for line in found:
        assert line["hosts"] == ["node1", "node1", "node2"]
        assert max(range(3), key=line["data"].__getitem__) == 1
        assert max(range(3), key=line["forward"].__getitem__) == 2
        assert min(line["data"][1], line["forward"][2]) >= _SLOW
        assert sum(line["step_times"].values()) == line["steps"]
        # The ranks wait for each other, so no step is shorter than that of a slow rank.
        assert min(10 ** (int(bucket) / 20) / 1e6 for bucket in line["step_times"]) >= 0.9 * _SLOW
    assert found[-1]["step"] == 24
    assert sum(line["steps"] for line in found) == 23  # all steps but the first of the start


def test_metrics_have_data_wait_of_rank_0():
    ranks.values(ranks.run(3, partial(train, slow_data=0, max_steps=10)))
    rows = [row for row in RunDirectory("run").rows() if "loss" in row]
    assert len(rows) == 5
    assert all(0.0 <= row["data_wait"] <= 1.0 for row in rows)
    assert max(row["data_wait"] for row in rows) > 0.3
    log = RunDirectory("run").log(0).read_text()
    assert re.search(r"step 2/10  loss \S+  lr 0.05  \d+ samples/s  data wait \d+ %", log)


def train_with_tracker(stops_at):
    """Train with a tracker and a trace; write standard error of each rank to a file."""

    def stop(step):
        if step == stops_at:
            os.kill(os.getpid(), signal.SIGUSR1)

    with open(f"output-{os.getpid()}", "w") as sys.stderr:
        return train(max_steps=40, resume=True, track="tensorboard", profile="2:5", each=stop)


def test_tracker_and_timings_continue_after_resume():
    results = ranks.run(3, train_with_tracker, 6)
    assert all(result[0] == "exit" for result in results)
    trace = RunDirectory("run").profile / "rank-0.json.gz"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    written = trace.stat().st_mtime_ns
    before, stopped = lines(), RunDirectory("run").steps()[-1]
    assert before[-1]["step"] == stopped < 40
    assert ranks.values(ranks.run(3, train_with_tracker, None)) == [40, 40, 40]
    assert lines()[: len(before)] == before
    assert [line["step"] for line in lines()][-1] == 40
    assert trace.stat().st_mtime_ns == written  # not written again
    texts = [path.read_text() for path in Path().glob("output-*")]
    assert len(texts) == 6
    assert sum("steps 3 to 5 are traced" in text for text in texts) == 1
    assert sum("step 40/40  top1 0.5" in text for text in texts) == 1
    # Without a terminal: no cursor control and no colours.
    assert not any(re.search(r"[^\n -~×]", text) for text in texts)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(2, 42, 2))
    assert [event.step for event in events.Scalars("top1")] == [40]


class HangingTracker(Tracker):
    """A tracker whose server never answers."""

    package = "json"

    def __init__(self, about):
        pass

    def open(self):
        threading.Event().wait(60)

    def log(self, step, seconds, values):
        pass

    def close(self, status):
        pass


def lock_and_status():
    """Return whether the lock file exists, and the status in the summary."""
    run = RunDirectory("run")
    return (run.path / ".lock").exists(), (run.read(run.summary) or {}).get("status")


class CtrlC(logging.Handler):
    """A log handler that sends SIGINT when the log offers Ctrl-C."""

    def emit(self, record):
        if "Ctrl-C ends it" in record.getMessage():
            self.found = lock_and_status()
            os.kill(os.getpid(), signal.SIGINT)


def train_with_hanging_tracker(timeout, ctrl_c=False):
    """Train with a tracker that hangs; return the step, and lock and status during the wait."""
    trackers.TRACKERS["hangs"] = HangingTracker
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests
    handler = CtrlC()
    if ctrl_c:
        logger.addHandler(handler)
    step = train(max_steps=4, track="hangs", timeout=timeout)
    return step, getattr(handler, "found", None)


@pytest.mark.slow
def test_hanging_tracker_does_not_hold_up_the_run():
    # The other ranks wait for rank 0 for 16 seconds.
    assert ranks.values(ranks.run(3, train_with_hanging_tracker, 8.0)) == [(4, None)] * 3
    assert lock_and_status() == (False, "done")
    log = RunDirectory("run").log(0).read_text()
    assert "waiting up to 2 s for --track hangs; Ctrl-C ends it" in log
    assert "--track hangs has not taken all rows within 2 s" in log


def test_signal_ends_the_wait_for_a_tracker():
    result = ranks.values(ranks.run(1, train_with_hanging_tracker, 1800.0, True, timeout=25))
    assert result == [(4, (False, "done"))]
    assert lock_and_status() == (False, "done")
    assert "--track hangs has not taken all rows" in RunDirectory("run").log(0).read_text()


def train_with_failing_close():
    """Train with a writer that fails to close; return the log handlers that remain."""

    def fail(*_):
        raise OSError("no end")

    CheckpointManager.close = fail
    with contextlib.suppress(OSError):
        train(max_steps=4)
    return [type(handler).__name__ for handler in logger.handlers]


def test_error_while_closing_still_closes_the_rest():
    assert ranks.values(ranks.run(1, train_with_failing_close)) == [["_StandardError"]]
    assert lock_and_status() == (False, "done")


def train_on_terminal(stops_at):
    """Train on a terminal; return its text, and whether standard error is the same at the end."""
    progress._SECONDS_BETWEEN_FRAMES = 0.0
    os.environ.update(TERM="xterm", COLUMNS="120")
    reader_end, terminal_end = pty.openpty()
    output, ended = [], threading.Event()

    def read():
        while select.select([reader_end], [], [], 0.1)[0] or not ended.is_set():
            if select.select([reader_end], [], [], 0)[0]:
                output.append(os.read(reader_end, 4096))

    reader = threading.Thread(target=read)
    reader.start()
    terminal = sys.stderr = os.fdopen(terminal_end, "w")

    def stop(step):
        if step == stops_at:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        train(max_steps=8, each=stop)
    unchanged = sys.stderr is terminal
    terminal.flush()
    ended.set()
    reader.join(10)
    return b"".join(output).decode(), unchanged


@pytest.mark.parametrize("stops_at", [None, 3])
def test_progress_bar_restores_the_terminal(stops_at):
    ((text, unchanged),) = ranks.values(ranks.run(1, train_on_terminal, stops_at))
    assert unchanged
    assert "\x1b[?25l" not in text  # the cursor is never hidden
    plain = [
        line.strip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    ]
    bars = [line for line in plain if re.match(r"epoch 1 .* \d+/8( |$)", line)]
    assert any("samples/s" in line for line in bars)
    if stops_at is None:
        assert "8/8" in bars[-1]
        assert "hpctrain: epoch 1  step 8/8  top1 0.5" in plain
    log = RunDirectory("run").log(0).read_text()
    assert "step 2/8  loss" in log  # the log file has lines although the terminal has a bar


@pytest.mark.parametrize(
    ("options", "fix"),
    [({"track": "tensorbord"}, "--track tensorboard"), ({"profile": "9"}, "--profile 20:25")],
)
def test_missing_tracker_is_refused_on_all_ranks(options, fix):
    results = ranks.run(3, partial(train, max_steps=2, **options))
    assert all(isinstance(result, UsageError) for result in results)
    assert fix in results[0].fixes[0]


def test_samples_per_second_counts_the_global_batch():
    ranks.values(ranks.run(3, partial(train, max_steps=24, log_every=2)))
    run = RunDirectory("run")
    rows = [row for row in run.rows() if "samples_per_second" in row]
    counted = [
        row["samples_per_second"] * (row["time"] - before["time"])
        for before, row in itertools.pairwise(rows)
        if before["epoch"] == row["epoch"]
    ]
    # A row's time is taken shortly after its seconds; with the batch of one rank it would be 4.
    assert statistics.median(counted) == pytest.approx(12, rel=0.4)
    summary = run.read(run.summary)
    assert summary["samples_per_second"] * summary["seconds"] == pytest.approx(24 * 6)
