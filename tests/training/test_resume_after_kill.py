"""Kill anything, any time: the run goes on, bit for bit."""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import faults
import launches
import pytest
import survivor

from hpctrain import rundir
from hpctrain.errors import NonFiniteError, UsageError

SIZE = 3
# A stop is agreed upon about once a second, and where the run saves: here it saves late.
SLOW = ("--pace", "0.2", "--checkpoint-every", "1000")
LEFT = [("exit", 0)] * SIZE


def _slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _hurt(name, *faults, marks=()):
    return pytest.param(faults, id=name, marks=marks)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    return faults.References(tmp_path_factory)


@pytest.fixture(params=["ddp", *_slow("horovod")])
def over(request, lacking):
    """Options that choose the backend."""
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    return ("--backend", request.param)


def _stopped(start, run="run"):
    """A start that was stopped: all ranks left together, after one checkpoint of one step."""
    assert start.results == LEFT, start
    assert start.code == rundir.STOPPED, start.verdict
    directory = rundir.RunDirectory(run)
    summary = json.loads(directory.summary.read_text())
    assert summary["status"] == "stopped"
    last = faults.last_steps(run)
    assert set(last.values()) in ({summary["step"]}, set())
    if summary["step"]:
        assert directory.steps()[-1] == summary["step"]
    return summary["step"]


@pytest.mark.parametrize("seed", [1, *_slow(*range(2, 51))])
def test_kill_9_of_a_rank(over, undisturbed, seed):
    draw = random.Random(seed)
    options = (*over, "--optimizer", draw.choice(("sgd", "adam")))
    for _ in range(draw.randint(1, 2)):
        place = f"{draw.randrange(24)}:rank{draw.randrange(SIZE)}"
        killed = faults.start(
            SIZE, *options, "--resume", hurt=(f"kill={draw.uniform(0, 0.02):.4f}@{place}",)
        )
        if killed.code == rundir.DONE:
            break  # the run was over before the rank was
        assert killed.code in (None, rundir.FAILED)
        assert all(isinstance(result, Exception) for result in killed.results)
    if killed.code != rundir.DONE:
        assert faults.go_on(SIZE, *options) == 1
    faults.same("run", undisturbed(SIZE, *options))


@pytest.mark.parametrize("step", [14, *_slow(3)])
def test_kill_9_of_all_ranks(over, undisturbed, step):
    killed = faults.start(SIZE, *over, hurt=(f"kill@{step}",))
    assert killed.code is None
    assert faults.go_on(SIZE, *over) == 1
    faults.same("run", undisturbed(SIZE, *over))


@pytest.mark.parametrize("how", ["usr2:1", "file:1", "request:2", *_slow("usr1:0", "term:2")])
def test_a_stop_saves_one_step_on_all_ranks_and_leaves(over, undisturbed, how):
    kind, rank = how.split(":")
    stopped = faults.start(SIZE, *over, *SLOW, hurt=(f"{kind}@3:rank{rank}",))
    assert 3 < _stopped(stopped) < 24
    assert not Path("run/stop").exists()
    assert faults.go_on(SIZE, *over) == 1
    faults.same("run", undisturbed(SIZE, *over))


@pytest.mark.parametrize(
    "hurt",
    [
        _hurt("collective", "sleep=1@3:rank1", "usr2=0.3@3:rank0"),
        _hurt("gathering-a-save", "usr2@save5:rank0", marks=pytest.mark.slow),
        _hurt("writing-a-save", "usr2=0.003@save5:rank0"),
        _hurt("evaluation", "usr2@eval0:rank1"),
        _hurt("its-sum", "sleep=1@eval0:rank2", "usr2=0.3@eval0:rank1", marks=pytest.mark.slow),
        _hurt("before-the-run", "usr2@opened:rank1"),
        _hurt("before-the-first-step", "usr2@entered:rank1", marks=pytest.mark.slow),
        _hurt("before-all", "file@imports:rank0"),
    ],
)
def test_a_stop_is_handled_wherever_it_comes(over, undisturbed, hurt):
    stopped = faults.start(SIZE, *over, hurt=hurt)
    assert _stopped(stopped) < 24
    assert faults.go_on(SIZE, *over) == 1
    faults.same("run", undisturbed(SIZE, *over))


def test_a_signal_before_the_session_ends_a_start_that_leaves_nothing(undisturbed):
    killed = faults.start(SIZE, hurt=("usr2@imports",))
    assert killed.verdict is None
    assert not Path("run").exists()
    assert faults.go_on(SIZE) == 1
    faults.same("run", undisturbed(SIZE))


def test_stops_after_the_last_step_of_an_epoch_and_of_the_run(undisturbed):
    for step, end in ((5, 8), (23, 24)):
        stopped = faults.start(
            SIZE, "--resume", "--checkpoint-every", "8", hurt=(f"usr2@{step}:rank1",)
        )
        assert _stopped(stopped) == end
    assert faults.go_on(SIZE) == 1
    faults.same("run", undisturbed(SIZE))


def _in_thread(found, *arguments, **keywords):
    def target():
        found.append(faults.start(*arguments, **keywords))

    thread = threading.Thread(target=target)
    thread.start()
    return thread


def _refused(start):
    assert all(isinstance(result, UsageError) for result in start.results), start
    assert start.code == UsageError.exit_code


def _eventually(happened, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_second_start_in_the_directory_is_refused_and_the_first_unharmed(undisturbed):
    found = []
    first = _in_thread(found, SIZE, "--pace", "0.1", label="first")
    try:
        _eventually(lambda: faults.last_steps("run").get(0, 0) > 6)
        second = faults.start(SIZE, "--resume", label="second")
    finally:
        first.join()
    _refused(second)
    assert found[0].code == rundir.DONE
    faults.same("run", undisturbed(SIZE))


def test_of_two_starts_at_once_one_is_refused(undisturbed):
    found = []
    threads = [_in_thread(found, SIZE, "--pace", "0.02", label=f"{n}") for n in range(2)]
    for thread in threads:
        thread.join()
    refused, done = sorted(found, key=lambda start: start.code == rundir.DONE)
    _refused(refused)
    assert done.code == rundir.DONE, done
    faults.same("run", undisturbed(SIZE))


def test_another_world_is_refused_and_elastic_takes_every_sample_that_is_left(undisturbed):
    whole = faults.consumed(undisturbed(4))
    faults.start(4, hurt=("kill@11",))
    for size in (2, 3):
        refused = faults.start(size, "--resume")
        _refused(refused)
        assert "--elastic" in refused.results[0].fix
    shutil.copytree("run", "also")
    assert faults.start(3, "--elastic", hurt=("kill@17",)).code is None
    assert faults.go_on(2, "--elastic") == 1
    assert faults.go_on(3, "--elastic", run="also") == 1
    assert faults.consumed("run") == faults.consumed("also") == whole


def test_a_crash_at_the_same_step_every_time_is_given_up(undisturbed):
    crashed = []
    for restart in range(8):
        env = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restart)}
        crashed.append(faults.start(SIZE, hurt=("crash@12:always",), env=env))
        if crashed[-1].code == rundir.GIVEN_UP:
            break
    assert [start.code for start in crashed] == [rundir.FAILED] * 4 + [rundir.GIVEN_UP]
    assert json.loads(Path("run/summary.json").read_text())["status"] == "given-up"
    assert faults.go_on(SIZE) == 1
    faults.same("run", undisturbed(SIZE))


@pytest.mark.slow
def test_a_run_that_gets_on_is_never_given_up(undisturbed):
    for restart, step in enumerate((6, 11, 16, 21)):
        env = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restart)}
        faults.start(SIZE, hurt=(f"crash@{step}",), env=env)
    env = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "4"}
    assert faults.go_on(SIZE, env=env) == 1
    faults.same("run", undisturbed(SIZE))


def test_nan_on_one_rank_ends_all_ranks_at_one_step(over, undisturbed):
    ended = faults.start(SIZE, *over, hurt=("nan@11:rank1",))
    assert all(isinstance(result, NonFiniteError) for result in ended.results), ended
    assert len({result.found for result in ended.results}) == 1
    assert ended.code == NonFiniteError.exit_code
    assert rundir.RunDirectory("run").steps()[-1] == 10
    assert faults.go_on(SIZE, *over) == 1
    faults.same("run", undisturbed(SIZE, *over))


def test_nan_on_one_rank_is_skipped_by_all_in_fp16(over):
    skipped = faults.start(SIZE, *over, "--precision", "fp16", hurt=("nan@11:rank1",))
    assert skipped.code == rundir.DONE, skipped
    before, after = (row for row in faults.rows("run") if row["step"] in (11, 12) and "lr" in row)
    assert after["skipped"] == before["skipped"] + 1
    assert after["loss_scale"] == before["loss_scale"] / 2


def test_an_overflow_across_a_checkpoint(over, undisturbed):
    overflow = ("overflow@9:always", "overflow@10:always", "overflow@11:always")
    options = (*over, "--precision", "fp16")
    faults.start(SIZE, *options, hurt=(*overflow, "kill@12:rank1"))
    assert faults.go_on(SIZE, *options, hurt=overflow) == 1
    faults.same("run", undisturbed(SIZE, *options, hurt=overflow))


@pytest.mark.parametrize("kind", ["term", *_slow("usr2")])
def test_a_signal_to_all_processes_of_the_step_spares_loader_workers(over, undisturbed, kind):
    options = (*over, "--workers", "2", "--context", "fork")
    stopped = faults.start(SIZE, *options, *SLOW, hurt=(f"{kind}-all@3",))
    assert _stopped(stopped) < 24
    assert faults.go_on(SIZE, *options) == 1
    faults.same("run", undisturbed(SIZE, *over))


@pytest.mark.parametrize("size", [1, *_slow(SIZE)])
def test_a_signal_to_all_processes_spares_workers_that_were_spawned(undisturbed, size):
    options = ("--workers", "1", "--context", "spawn")
    stopped = faults.start(size, *options, *SLOW, hurt=("usr2-all@3",), timeout=150)
    assert stopped.code == rundir.STOPPED
    assert faults.go_on(size, *options, timeout=150) == 1
    faults.same("run", undisturbed(size))


def test_ctrl_c_once_saves_and_leaves_and_twice_leaves(undisturbed):
    command = [sys.executable, survivor.__file__, *faults.OPTIONS, "--resume", *SLOW]

    def interrupted(step, times):
        process = subprocess.Popen(
            [*command, f"--fault=sleep=1@{step}"],
            env=launches.environ(),
            # The background of a shell's script ignores Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        try:
            mark = Path("run.faults", f"sleep=1@{step}-of-0")
            _eventually(mark.exists)
            for _ in range(times):
                os.kill(process.pid, signal.SIGINT)
                time.sleep(0.1)
            return process.wait(30)
        finally:
            process.kill()
            process.wait()

    assert interrupted(3, 1) == rundir.STOPPED
    (saved,) = faults.last_steps("run").values()
    assert rundir.RunDirectory("run").steps()[-1] == saved
    assert 3 < saved < 16
    assert interrupted(saved + 2, 2) == -signal.SIGINT
    assert faults.go_on(1) == 1
    faults.same("run", undisturbed(1))
