"""Watchdog: a rank that hangs is named, and the run ends soon after the time-out."""

import contextlib
import ctypes
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import torch
from battery import images, session, small_model
from torch import nn

from hpctrain.errors import exit_codes
from hpctrain.monitoring.watchdog import shared_memory
from hpctrain.rundir.exit_status import read_exit_status

TIMEOUT = 5.0  # longer than a first step takes on a busy machine
# More than the time-out, the agreement between hosts, and the import of what a step needs.
SECONDS = 100.0
HANG_AT = 5


def stop_process():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)  # it runs for a moment, to show its stack


def hold_the_gil():
    while True:  # the signal that asks for the stack ends a sleep
        ctypes.PyDLL(None).sleep(1000)


def wait_for_a_file():
    while not Path("never").exists():
        time.sleep(0.01)


class Samples(torch.utils.data.Dataset):
    """Images; the loading of one of them hangs."""

    def __init__(self, hangs):
        self.images, self.left_to_load = images(240), 4 * HANG_AT if hangs else -1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.left_to_load == 0:
            wait_for_a_file()
        self.left_to_load -= 1
        return self.images[index]


class HangingBackward(nn.Module):
    """A module whose backward pass hangs once."""

    def __init__(self, hangs):
        super().__init__()
        self.calls = 0 if hangs else -1000

    def forward(self, values):
        self.calls += 1
        if self.calls == HANG_AT:
            values.register_hook(lambda _: wait_for_a_file())
        return values


def train(how, victim):
    """Train until one rank hangs: in the script, in the backward pass, or in its data set."""
    with session(batch_size=4, epochs=20, timeout=TIMEOUT, run_dir="run") as opened:
        hangs = opened.world.rank == victim
        model = nn.Sequential(small_model(), HangingBackward(hangs and how == "backward"))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        loader = opened.loader(Samples(hangs and how == "load"))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    if hangs and run.step == HANG_AT and how == "before":
                        wait_for_a_file()
                    loss = nn.functional.cross_entropy(model(batch), targets)
                    if hangs and run.step == HANG_AT and callable(how):
                        how()
                    opened.step(loss)


def remains(mark):
    """Return the processes and shared folders of a start that still exist."""
    found = processes.having(mark, "environ")
    for path in shared_memory.FOLDER.glob("hpctrain-watch-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if os.fsencode(os.getcwd()) in file.read(1 << 20):
                found.append(path)
    return found


DDP, HOROVOD, FSDP = "auto", "horovod", "fsdp"
SLOW = pytest.mark.slow
IN_STOP = "in the script's code: process", "in stop_process"
IN_GIL = "in the script's code", "in hold_the_gil"
IN_LOADER = "waits for data", "in __getitem__"
# Where the ranks of fsdp gather weights, for which all are needed.
IN_SCRIPT = "in the script's code", "in wait_for_a_file"


@pytest.mark.parametrize(
    ("run", "how", "victim", "layout", "words", "stack"),
    [
        pytest.param(DDP, stop_process, 2, (2, 1), *IN_STOP, id="ddp-stopped-on-another-host"),
        pytest.param(HOROVOD, hold_the_gil, 2, (3,), *IN_GIL, id="horovod-holds-the-gil"),
        pytest.param(DDP, "load", 0, (3,), *IN_LOADER, id="ddp-loading", marks=SLOW),
        pytest.param(HOROVOD, stop_process, 1, (3,), *IN_STOP, id="horovod-stopped", marks=SLOW),
        pytest.param(HOROVOD, "load", 0, (3,), *IN_LOADER, id="horovod-loading", marks=SLOW),
        pytest.param(FSDP, "before", 1, (3,), *IN_SCRIPT, id="fsdp-before-the-forward-pass"),
        pytest.param(FSDP, stop_process, 2, (2, 1), *IN_STOP, id="fsdp-stopped", marks=SLOW),
        pytest.param(FSDP, "load", 0, (3,), *IN_LOADER, id="fsdp-loading", marks=SLOW),
    ],
    indirect=["run"],
)
def test_hanging_rank_is_named_and_its_stack_shown(run, how, victim, layout, words, stack):
    """Let one rank hang; name it, show its stack, and end all ranks."""
    reason, logs = run_until_hang(run, how, victim, layout)
    host = f"node{len(layout)}"
    assert reason.startswith(f"rank {victim} on {host}: silent for ")
    assert f" at step {HANG_AT}, {words}" in reason
    assert f"{stack}\n" in logs[host]
    for text in logs.values():
        assert f"hpctrain: error: {reason}\n" in text


def run_until_hang(run, how, victim, layout):
    """Run `train` until the watchdog ends it; return the reason and the log of each helper."""
    mark = secrets.token_hex(8)
    env = {"HPCTRAIN_EXIT_STATUS_FILE": str(Path("exit-status").absolute()), "TEST_MARK": mark}
    env |= run.keywords["env"]
    results = run(3, train, how, victim, layout=layout, timeout=SECONDS, env=env)
    assert all(isinstance(result, Exception) for result in results), results
    code, reason = read_exit_status("exit-status")
    assert code == exit_codes.FAILED
    processes.until(lambda: not remains(mark))
    files = {path.stem.partition("-")[2]: path for path in Path("run/logs").glob("watch-*.log")}
    assert len(files) == len(layout)
    return reason, {host: path.read_text() for host, path in files.items()}


@pytest.mark.parametrize(
    "run",
    [DDP, *(pytest.param(backend, marks=SLOW) for backend in (HOROVOD, FSDP))],
    indirect=True,
    ids=["ddp", "horovod", "fsdp"],
)
def test_hanging_backward_pass_is_shown(run):
    """Let the backward pass of one rank hang; end all ranks."""
    reason, logs = run_until_hang(run, "backward", 1, (3,))
    assert reason.startswith("rank 1 on node1: silent for ")
    assert "in the backward pass" in reason
    assert logs["node1"].count("in wait_for_a_file\n") == 1


SLOW_SECONDS = 12.0  # the learnt time-out of the test is two seconds, and a helper needs five more


def compute():
    """Use a processor in one call of C, in which the stack stays the same."""
    end = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha512", b"password", b"salt", 2_000_000)


def compute_in_a_child():
    code = (
        f"import time; end = time.monotonic() + {SLOW_SECONDS}\nwhile time.monotonic() < end: pass"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def suspend_all():
    """Stop all ranks, as `scontrol suspend` does, and continue them."""
    pids = [Path(f"pid-{rank}").read_text() for rank in range(3)]
    stop, go_on = (f"kill -{name} {' '.join(pids)}" for name in ("STOP", "CONT"))
    subprocess.Popen(["sh", "-c", f"{stop}; sleep {SLOW_SECONDS}; {go_on}"]).wait()


class SlowState:
    """A state of the script that takes long to save."""

    def __init__(self, slow):
        self.slow = slow

    def state_dict(self):
        if self.slow:
            compute()
        return {"value": 1}

    def load_state_dict(self, state):
        pass


def train_slowly():
    """Train with phases that are slow on rank 1 after they were fast; return the steps."""
    with session(batch_size=4, epochs=1, run_dir="run", checkpoint_every=3) as opened:
        rank = opened.world.rank
        Path(f"pid-{rank}").write_text(str(os.getpid()))
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        loader = opened.loader(Samples(False))
        evaluation = opened.loader(images(24), train=False, batch_size=2)
        state = SlowState(False)
        with opened.run(state={"slow": state}) as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    slow = {11: compute, 13: compute_in_a_child, 15: suspend_all}.get(run.step)
                    if slow and rank == 1:
                        slow()
                    state.slow = run.step == 17 and rank == 1
                    opened.step(nn.functional.cross_entropy(model(batch), targets))
                    for number, _ in enumerate(evaluation):
                        if rank == 1 and (run.step, number) == (13, 1):
                            compute()
        return run.step


@pytest.mark.slow
@pytest.mark.parametrize("run", [DDP, HOROVOD, FSDP], indirect=True, ids=["ddp", "horovod", "fsdp"])
def test_slow_steps_saves_evaluations_and_suspended_jobs_are_no_hangs(run):
    """Train with a learnt time-out of two seconds; no slow phase ends the run."""
    env = {"HPCTRAIN_LEAST_TIMEOUT": "2", **run.keywords["env"]}
    results = run(3, train_slowly, timeout=SECONDS * 2, env=env)
    assert results == [20, 20, 20], results
    assert "hpctrain: error" not in Path("run/logs/watch-node1.log").read_text()
