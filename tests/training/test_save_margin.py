"""Save margin: a run stops before the time limit of its job, by the time of a save."""

import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ranks
import torch
from battery import images, session, small_model
from clock import Clock
from torch import nn

from hpctrain.checkpoint.folder import Folder
from hpctrain.checkpoint.writer import Writer
from hpctrain.cluster import slurm
from hpctrain.cluster.job import Allocation
from hpctrain.errors import exit_codes
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.exit_status import read_exit_status
from hpctrain.training import checkpoint_manager
from hpctrain.training.preemption import Preemption

NOW = 1_700_000_000
STEPS = 120


def train(save_seconds, pause_seconds):
    """Train on clocks that only saves and pauses between epochs move; return the steps taken."""
    saves, pauses, write = Clock(), Clock(), Folder.save

    def save(*arguments):
        saves.move(save_seconds)
        return write(*arguments)

    with (
        mock.patch.object(Folder, "save", save),
        mock.patch.object(checkpoint_manager, "Writer", partial(Writer, clock=saves)),
        mock.patch(
            "hpctrain.training.training_run.time", SimpleNamespace(monotonic=pauses, time=time.time)
        ),
        mock.patch.object(
            sys.modules["hpctrain.training.session"],
            "Preemption",
            partial(Preemption, clock=lambda: NOW),
        ),
        session(batch_size=4, epochs=6, checkpoint_every=10, run_dir="run") as opened,
    ):
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        loader = opened.loader(images(240))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    opened.step(nn.functional.cross_entropy(model(batch), targets))
                pauses.move(pause_seconds)
        return run.step


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize(
    ("save_seconds", "pause_seconds", "margin"),
    [
        pytest.param(0, 0, 5 + 2 * 10, id="before-the-first-save"),
        pytest.param(100, 50, 5 + 2 * 100 + 50, id="slow-saves-and-evaluation"),
    ],
)
def test_preemption_stops_the_run_one_save_margin_before_the_time_limit(
    save_seconds, pause_seconds, margin, spare
):
    """The margin is 5 s, twice the longest save (10 s before the first one), and a pause."""
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": str(NOW + margin + spare),
        "HPCTRAIN_EXIT_STATUS_FILE": str(Path("exit-status").absolute()),
    }
    results = ranks.run(3, train, save_seconds, pause_seconds, env=env)
    if spare:
        assert results == [STEPS] * 3
        return
    assert results == [("exit", 0)] * 3  # the exit status file has the code
    code, reason = read_exit_status("exit-status")
    assert code == exit_codes.STOPPED
    assert reason.startswith("the end of the job's time, ")
    steps = RunDirectory("run").steps()
    if save_seconds:
        assert reason.endswith(f", after step {steps[-1]}")
        assert 10 <= steps[-1] < STEPS
    else:
        assert reason.endswith("before the first step")


def test_save_margin_is_that_of_the_longest_save(tmp_path):
    clock, seconds = Clock(), iter([3.0, 40.0, 7.0])

    def save(*_):
        clock.move(next(seconds))

    writer = Writer(RunDirectory(tmp_path), clock=clock)
    parts, margins = SimpleNamespace(_writer=writer), []
    with mock.patch.object(Folder, "save", save):
        margins.append(checkpoint_manager.CheckpointManager.save_margin(parts))
        for step in (1, 2, 3):
            writer.save(step, {}, {})
            writer.wait()
            margins.append(checkpoint_manager.CheckpointManager.save_margin(parts))
    writer.close()
    assert margins == [25.0, 11.0, 85.0, 85.0]


SHOWN = (
    "JobId=70 JobName=train EligibleTime=1700000000 StartTime=1700000000 EndTime={end} "
    "Deadline=N/A SuspendTime=None"
)


@pytest.fixture
def scontrol(tmp_path):
    """Return a function that makes a fake scontrol, and returns the environment with it."""

    def make(end, code=0):
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        # Like the real scontrol, which prints times in SLURM_TIME_FORMAT.
        program.write_text(
            "#!/bin/sh\n"
            '[ "$*" = "show job --oneliner 70_3" ] || exit 2\n'
            f'[ "$SLURM_TIME_FORMAT" = %s ] && echo "{SHOWN.format(end=end)}"\n'
            f"exit {code}\n"
        )
        program.chmod(0o755)
        return {"PATH": str(program.parent), "SLURM_TIME_FORMAT": "standard"}

    return make


def test_slurm_end_time_is_read_from_scontrol(scontrol):
    assert slurm.end_time("70_3", scontrol(NOW)) == NOW


@pytest.mark.parametrize(("end", "code"), [("Unknown", 0), (NOW, 1)])
def test_slurm_end_time_is_unknown_without_a_limit_or_an_answer(scontrol, end, code):
    assert slurm.end_time("70_3", scontrol(end, code)) is None


@pytest.mark.parametrize("label", ["70_3", "--help", "70; true"])
def test_slurm_end_time_is_unknown_without_slurm(tmp_path, label):
    assert slurm.end_time(label, {"PATH": str(tmp_path)}) is None


def test_run_asks_slurm_for_an_end_time_that_the_job_does_not_set(scontrol, tmp_path):
    job = Allocation("slurm", "73", array_job_id="70", array_task=3)
    with ExitStack() as undo:
        preemption = Preemption(0, scontrol(NOW + 60), job, undo, clock=lambda: NOW)
        preemption.opened()
        assert preemption.asked(save_margin=60.0) is None
        preemption.begin(RunDirectory(tmp_path))
        for thread in threading.enumerate():
            if thread.name == "end of the job":
                thread.join(60)
        assert preemption.asked(save_margin=60.0) == "the end of the job's time"
