"""The same script on a Mac: what macOS lacks is taken away from Linux (support/like_macos)."""

import os
import re
import subprocess

import launches
import processes
import pytest

from hpctrain.cluster import system

pytestmark = pytest.mark.e2e

LIKE_MACOS = str(launches.TOP / "tests" / "support" / "like_macos")
MAC = {"PYTHONPATH": os.pathsep.join([LIKE_MACOS, *filter(None, [os.environ.get("PYTHONPATH")])])}
HPCTRAIN = str(launches.BIN / "hpctrain")
TWO = [HPCTRAIN, "run", "--nproc-per-node", "2"]

SCRIPT = """\
import os, pathlib, signal, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import hpctrain

LENGTH = {"max_steps": 12, "checkpoint_every": 2, "seed": 3}

def main():
    parser = hpctrain.options()
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--hang-at", type=int, default=-1)
    options = parser.parse_args()
    with hpctrain.Session(options, global_batch=8, **LENGTH) as session:
        samples = TensorDataset(torch.arange(64.0).reshape(32, 2) / 64, torch.ones(32, 1))
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
        loader = session.loader(samples)
        with session.run() as run:
            for epoch in run.epochs():
                for x, y in run.batches(loader):
                    session.step(nn.functional.mse_loss(model(x), y))
                    last = session.world.rank == session.world.world_size - 1
                    if run.step == options.die_at and last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if run.step == options.hang_at and last:
                        time.sleep(1000)
        session.save_weights("weights.pt", model)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def train(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(*options, launcher=(launches.PYTHON,), **more):
        command = [*launcher, "train.py", "--run-dir", "run", *options]
        done = launches.start(command, tmp_path, **{**MAC, **more})
        assert "imports its modules itself" not in done.stderr  # no rank was to be forked
        return done

    return start


@pytest.mark.parametrize(
    "launcher", [[launches.PYTHON], [*TWO[:-1], "3"]], ids=["one process", "three ranks"]
)
def test_losses_on_a_mac_are_those_on_linux(launcher, reproducibility_reference, tmp_path):
    command = [*launcher, str(launches.TWICE), *launches.PARITY]
    done = launches.start(command, tmp_path, **MAC)
    assert done.returncode == 0, done.stderr
    launches.same_losses(tmp_path, reproducibility_reference)


def weights(folder):
    import torch

    return torch.load(folder / "weights.pt")


def test_run_continues_bit_for_bit_after_kill_9_of_a_rank(train, tmp_path):
    done = train("--run-dir", "whole", launcher=TWO)
    assert done.returncode == 0, done.stderr
    expected = weights(tmp_path)
    (tmp_path / "weights.pt").unlink()
    done = train("--die-at", "7", launcher=TWO)
    assert "rank 1 failed first, with signal SIGKILL" in done.stderr
    done = train("--resume", launcher=TWO)
    assert done.returncode == 0, done.stderr
    assert "step 00000006" in done.stderr or "step 6" in done.stderr
    found = weights(tmp_path)
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_loader_workers_start_by_spawn_and_change_no_number(train, tmp_path):
    assert train("--run-dir", "without").returncode == 0
    expected = weights(tmp_path)
    done = train("--workers", "2")
    assert done.returncode == 0, done.stderr
    assert all(weights(tmp_path)[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_watchdog_ends_a_run_that_hangs_and_shows_where(train):
    done = train("--hang-at", "5", "--timeout", "15", launcher=TWO)
    assert done.returncode != 0
    assert "HT659" in done.stderr
    assert re.search(r'File ".*/train\.py", line \d+ in main', done.stderr)


def test_ranks_end_with_a_killed_launcher(train, tmp_path):
    command = [*TWO, "train.py", "--run-dir", "run", "--hang-at", "3"]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, cwd=tmp_path, env=launches.environ(**MAC), **output)
    try:
        processes.until((tmp_path / "run" / "checkpoints" / "step-00000002").exists)
        family = system.family(launcher.pid)[1:]
    finally:
        launcher.kill()
        launcher.wait()
    assert len(family) > 2
    processes.until(lambda: not any(map(system.started, family)))


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_spawn_returns_the_result_of_each_rank(nproc, tmp_path):
    code = f"import hpctrain; print(hpctrain.spawn(lambda: hpctrain.detect().rank, {nproc}))"
    done = launches.start([launches.PYTHON, "-c", code], tmp_path, **MAC)
    assert done.stdout.strip() == str(list(range(nproc)))


def test_script_without_a_guard_is_told_what_to_change(tmp_path):
    script = SCRIPT.replace('if __name__ == "__main__":\n    main()', "main()")
    (tmp_path / "train.py").write_text(script)
    done = launches.start([launches.PYTHON, "train.py", "--workers", "1"], tmp_path, **MAC)
    assert (done.returncode, done.stderr.count("HT109")) == (2, 1)
    assert "Traceback" not in done.stderr


def test_loader_without_workers_leaves_the_start_method_to_the_script(tmp_path):
    script = SCRIPT.replace("    main()", "    main(); multiprocessing.set_start_method('spawn')")
    (tmp_path / "train.py").write_text(f"import multiprocessing\n{script}")
    command = [launches.PYTHON, "train.py", "--run-dir", "run", "--workers", "0"]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr


def test_session_outside_of_the_guard_is_told_what_to_change(tmp_path):
    """As in a script that makes its own loader below the guard."""
    (tmp_path / "train.py").write_text(
        "import multiprocessing, hpctrain\n"
        "session = hpctrain.Session(batch_size=1).__enter__()\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.Process(target=print)\n"
        "    worker.start(); worker.join(); raise SystemExit(worker.exitcode)\n"
    )
    done = launches.start([launches.PYTHON, "train.py"], tmp_path, **MAC)
    assert done.returncode == 2, done.stderr
    assert "runs train.py from its first line" in done.stderr
    assert "HT109" in done.stderr


COMMANDS = [
    "doctor",
    "status",
    "report run",
    "logs run",
    "checkpoint show run",
    "explain",
    "init x.py",
]


def test_commands_work_on_a_mac(train, tmp_path):
    assert train().returncode == 0
    for command in COMMANDS:
        done = launches.start([HPCTRAIN, *command.split()], tmp_path, **MAC)
        assert done.returncode == 0, (command, done.stderr)
        assert "Traceback" not in done.stderr
