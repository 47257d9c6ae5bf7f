"""What a closed session leaves behind: nothing, and a run whose stop the script has caught."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import pytest
import ranks
import torch
from battery import images, session, small_model
from torch import nn

import hpctrain


def train_and_catch(**options):
    """Train in a loop that catches every exception, and request a stop at step 3."""
    with session(global_batch=12, seed=2, run_dir="run", log_every=1, **options) as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        loader = opened.loader(images(480))
        with opened.run() as run:
            caught = []
            for _ in run.epochs(2):
                try:
                    for batch, targets in run.batches(loader):
                        opened.step(nn.functional.cross_entropy(model(batch), targets))
                        run.log(step=run.step)
                        if run.step == 3 and opened.is_main:
                            run.directory.stop.touch()
                except BaseException as error:
                    caught.append(type(error).__name__)
                    break
            # Inside of an epoch: epochs() itself ends the run between two of them.
            assert bool(caught) == (not opened.options.resume)
        return run.step


@pytest.mark.parametrize("size", [1, 3])
def test_stop_that_the_script_catches_still_stops_and_resumes(size):
    assert ranks.run(size, train_and_catch) == [("exit", 75)] * size
    assert json.loads(Path("run/summary.json").read_text())["status"] == "stopped"
    assert ranks.values(ranks.run(size, go_on)) == [80] * size
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 81))


def go_on():
    Path("run/stop").unlink(missing_ok=True)
    return train_and_catch(resume=True)


def process_state():
    """Return what a session changes in its process."""
    numpy_state = numpy.random.get_state()
    return {
        "hook": sys.excepthook,
        "signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)],
        "random": random.getstate(),
        "numpy": (numpy_state[1].tolist(), numpy_state[2]),
        "torch": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
    }


def states_around_a_session():
    torch.manual_seed(7)
    before = process_state()
    with session(batch_size=4, deterministic=True, seed=3):
        random.random()
        torch.rand(3)
    return [name for name, value in process_state().items() if value != before[name]]


def test_hook_and_handlers_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    before = process_state()
    hpctrain.options()
    with session(batch_size=4, handle_signals=False, report_errors=False):
        inside = process_state()
    assert (inside["hook"], inside["signals"]) == (before["hook"], before["signals"])
    assert sys.excepthook is before["hook"]


@pytest.mark.parametrize("size", [1, 3])
def test_closed_session_takes_back_what_it_changed(size):
    assert ranks.values(ranks.run(size, states_around_a_session)) == [[]] * size
