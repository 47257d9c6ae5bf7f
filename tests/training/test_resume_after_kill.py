"""Runs that are killed or stopped resume at their newest checkpoint, bit for bit."""

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

from hpctrain import cli, rundir
from hpctrain.errors import NonFiniteError, UsageError, exit_codes
from hpctrain.monitoring.report import facts, runs
from hpctrain.rundir import effective_time

SIZE = 3
# The ranks agree on a stop about once a second, and where the run saves: here it saves late.
SLOW = ("--pace", "0.2", "--checkpoint-every", "1000")
LEFT = [("exit", 0)] * SIZE
# Steps at which a run saves: every fifth one, and the end of each epoch.
SAVES = (5, 8, 10, 15, 16, 20)


def slow_cases(*values):
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def fault_case(name, *faults, marks=()):
    return pytest.param(faults, id=name, marks=marks)


@pytest.fixture(params=["ddp", *slow_cases(("horovod",))])
def over(request, lacking):
    """Return the options that choose the backend."""
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    return ("--backend", request.param)


def stopped_step(start, run="run"):
    """Return the step of a stop; check that all ranks ended together, after its checkpoint."""
    assert start.results == LEFT, start
    assert start.code == exit_codes.STOPPED, start.exit_status
    directory = rundir.RunDirectory(run)
    summary = json.loads(directory.summary.read_text())
    assert summary["status"] == "stopped"
    last = faults.last_steps(run)
    assert set(last.values()) in ({summary["step"]}, set())
    if summary["step"]:
        assert directory.steps()[-1] == summary["step"]
    return summary["step"]


def least_saved(step):
    """Return the least checkpoint that is committed at a step: a save waits for the one before."""
    started = [0, 0, *(save for save in SAVES if save <= step)]
    return started[-2]


@pytest.mark.parametrize("over", ["ddp", "horovod", *slow_cases(("fsdp",))], indirect=True)
def test_resume_after_kill_9_of_one_rank(over, references):
    """Kill one rank in a step with kill -9, then resume."""
    killed = faults.start(SIZE, *over, hurt=("kill@13:rank1",))
    assert killed.code in (None, exit_codes.FAILED)
    assert all(isinstance(result, Exception) for result in killed.results)
    faults.resume(SIZE, *over)
    begin = faults.begins("run")[-1]
    assert begin in (8, 10)
    faults.same("run", references(SIZE, *over), twice=13 - begin)


def test_effective_training_time_of_a_killed_and_resumed_run(capsys):
    """Kill a rank two steps after a checkpoint, and resume: the same figures everywhere."""
    paced = ("--pace", "0.6", "--checkpoint-every", "3", "--max-steps", "6")
    faults.start(2, *paced, hurt=("kill@5:rank1",))
    directory = rundir.RunDirectory("run")
    before = effective_time.measure(directory)
    marks = {mark["event"]: mark for mark in directory.lines(directory.events)}
    assert marks["last step"]["step"] in (4, 5)  # not each one of the first steps is noted
    assert before.effective_seconds > 4 * 0.6
    assert before.lost_seconds["detect"] > 0
    assert (before.lost_seconds["redo"], before.lost_seconds["queue"]) == (0, 0)
    faults.resume(2, *paced)
    found = effective_time.measure(directory)
    lost = found.lost_seconds
    assert faults.begins("run") == [0, 3]
    # Steps 1 to 3 count once, and 4 to 6 of the second start; 4, and often 5, were taken twice.
    assert 6 * 0.6 < found.effective_seconds < found.wall_seconds - lost["redo"]
    assert 0.5 < lost["redo"] < before.effective_seconds
    assert all(lost[name] > 0 for name in ("load", "rendezvous", "queue"))
    assert found.effective_seconds + sum(lost.values()) == pytest.approx(found.wall_seconds)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary.items() >= found.as_json().items()
    capsys.readouterr()
    assert cli.main(["status", "--json", "run"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert job["run"]["effective_training_time"] == found.as_json()
    assert cli.main(["status", "run"]) == 0
    assert f"\n  time:     {found}\n" in capsys.readouterr().out
    (read,) = runs.read(["run"])
    shown = facts.summary(read)
    assert shown["effective training time"].startswith(f"{100 * found.share:.0f} % of ")
    assert shown["lost"] == found.lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "seed"),
    [
        *((backend, seed) for backend in ("ddp", "horovod") for seed in range(1, 51)),
        *(("fsdp", seed) for seed in range(1, 16)),
    ],
    indirect=["over"],
)
def test_resume_after_kill_9_of_a_random_rank_at_a_random_time(over, references, seed):
    """Kill a random rank once or twice at a random time with kill -9, then resume; by seed."""
    draw = random.Random(seed)
    options = (*over, "--optimizer", draw.choice(("sgd", "adam")))
    for _ in range(draw.randint(1, 2)):
        step, rank = draw.randrange(24), draw.randrange(SIZE)
        fault = f"kill={draw.uniform(0, 0.02):.4f}@{step}:rank{rank}"
        killed = faults.start(SIZE, *options, "--resume", hurt=(fault,))
        if killed.code == exit_codes.DONE:
            break  # the run ended before the kill
        assert killed.code in (None, exit_codes.FAILED)
        assert all(isinstance(result, Exception) for result in killed.results)
    if killed.code != exit_codes.DONE:
        faults.resume(SIZE, *options)
        assert faults.begins("run")[-1] >= least_saved(step)
    faults.same("run", references(SIZE, *options))


@pytest.mark.slow
def test_ranks_end_when_one_is_lost_in_a_sum_while_another_sum_is_under_way():
    """Kill rank 0 at thirty times of step 4: where all sums share one group, about 3 tries hang."""
    for number in range(30):
        fault = f"kill={number / 10_000}@4:rank0"
        lost = faults.start(
            SIZE, "--backend", "ddp", run=f"run-{number}", hurt=(fault,), timeout=30
        )
        assert all(isinstance(result, Exception) for result in lost.results), lost


@pytest.mark.parametrize(
    ("over", "step"),
    [("ddp", 14), ("horovod", 14), *slow_cases(("ddp", 3), ("horovod", 3), ("fsdp", 14))],
    indirect=["over"],
)
def test_resume_after_kill_9_of_all_ranks(over, references, step):
    """Kill all ranks at a step with kill -9, then resume."""
    killed = faults.start(SIZE, *over, hurt=(f"kill@{step}",))
    assert killed.code is None
    faults.resume(SIZE, *over)
    begin = faults.begins("run")[-1]
    assert begin in ((8, 10) if step == 14 else (0,))
    faults.same("run", references(SIZE, *over), twice=step - begin)


@pytest.mark.parametrize(
    ("over", "how"),
    [
        *(("ddp", "usr2:1"), ("horovod", "usr2:1"), ("ddp", "file:1"), ("ddp", "request:2")),
        *slow_cases(*(("ddp", how) for how in ("usr1:0", "term:2"))),
        *slow_cases(*(("fsdp", how) for how in ("file:1", "usr2:1"))),
        *slow_cases(*(("horovod", how) for how in ("file:1", "request:2", "usr1:0", "term:2"))),
    ],
    indirect=["over"],
)
def test_preemption_saves_one_step_on_all_ranks_and_resumes_there(over, references, how):
    """Send a signal to a rank, or make a stop file; all ranks save one step, then resume."""
    kind, rank = how.split(":")
    stopped = stopped_step(faults.start(SIZE, *over, *SLOW, hurt=(f"{kind}@3:rank{rank}",)))
    assert 3 < stopped < 24
    assert not Path("run/stop").exists()
    faults.resume(SIZE, *over)
    assert faults.begins("run") == [0, stopped]
    faults.same("run", references(SIZE, *over), twice=0)


@pytest.mark.parametrize(
    "hurt",
    [
        fault_case("collective", "sleep=1@3:rank1", "usr2=0.3@3:rank0", marks=pytest.mark.slow),
        fault_case("gathering-a-checkpoint", "usr2@save5:rank0", marks=pytest.mark.slow),
        fault_case("writing-a-checkpoint", "usr2=0.003@save5:rank0"),
        fault_case("evaluation", "usr2@eval0:rank1"),
        fault_case(
            "sum-of-evaluation",
            "sleep=1@eval0:rank2",
            "usr2=0.3@eval0:rank1",
            marks=pytest.mark.slow,
        ),
        fault_case("before-run", "usr2@opened:rank1"),
        fault_case("before-first-step", "usr2@entered:rank1", marks=pytest.mark.slow),
        fault_case("before-imports", "file@imports:rank0", marks=pytest.mark.slow),
    ],
)
def test_preemption_signal_during(over, references, hurt):
    """Send USR2, or make a stop file, in different phases of a run, then resume."""
    stopped = stopped_step(faults.start(SIZE, *over, hurt=hurt))
    assert stopped < 24
    faults.resume(SIZE, *over)
    assert faults.begins("run")[-1] == stopped
    faults.same("run", references(SIZE, *over), twice=0)


def test_preemption_signal_before_session_leaves_no_files(references):
    """Send USR2 to all ranks before the session, then start again."""
    killed = faults.start(SIZE, hurt=("usr2@imports",))
    assert killed.exit_status is None
    assert not Path("run").exists()
    faults.resume(SIZE)
    faults.same("run", references(SIZE), twice=0)


def test_preemption_after_last_step_of_an_epoch_and_of_the_run(references):
    """Stop a run by USR2 at the last step of an epoch, then of the run; resume each time."""
    for step, end in ((5, 8), (23, 24)):
        stopped = faults.start(
            SIZE, "--resume", "--checkpoint-every", "8", hurt=(f"usr2@{step}:rank1",)
        )
        assert stopped_step(stopped) == end
    faults.resume(SIZE)
    assert faults.begins("run") == [0, 8, 24]
    faults.same("run", references(SIZE), twice=0)


def start_in_thread(found, *arguments, **keywords):
    def target():
        found.append(faults.start(*arguments, **keywords))

    thread = threading.Thread(target=target)
    thread.start()
    return thread


def check_refused(start):
    assert all(isinstance(result, UsageError) for result in start.results), start
    assert start.code == UsageError.exit_code


def wait_until(happened, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_second_start_in_run_directory_is_refused(references):
    """Start a second time in the same run directory while the first start trains."""
    found = []
    first = start_in_thread(found, SIZE, hurt=("hold@7:rank0",), label="first")
    try:
        wait_until(Path("run.faults/hold@7:rank0-of-0").exists)
        second = faults.start(SIZE, "--resume", label="second")
    finally:
        Path("run.release").touch()
        first.join()
    check_refused(second)
    assert found[0].code == exit_codes.DONE
    faults.same("run", references(SIZE), twice=0)


def test_elastic_resume_takes_every_sample_once(references):
    """Kill a run of 4 ranks, and resume with --elastic on 3 and on 2 ranks."""
    uninterrupted = faults.consumed(references(4))
    faults.start(4, hurt=("kill@11",))
    shutil.copytree("run", "also")
    assert faults.start(3, "--elastic", hurt=("kill@17",)).code is None
    faults.resume(2, "--elastic")
    faults.resume(3, "--elastic", run="also")
    assert faults.begins("run")[1] == faults.begins("also")[1] in (8, 10)
    assert faults.begins("run")[2] in (15, 16)
    assert faults.consumed("run") == faults.consumed("also") == uninterrupted


def test_repeated_crash_at_one_step_is_given_up(references):
    """Crash at the same step in each restart of a job, until the run is given up; then resume."""
    crashed = []
    for restart in range(8):
        env = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restart)}
        crashed.append(faults.start(SIZE, hurt=("crash@12:always",), env=env))
        if crashed[-1].code == exit_codes.GIVEN_UP:
            break
    assert [start.code for start in crashed] == [exit_codes.FAILED] * 4 + [exit_codes.GIVEN_UP]
    assert json.loads(Path("run/summary.json").read_text())["status"] == "given-up"
    faults.resume(SIZE)
    assert faults.begins("run") == [0, *[10] * 4]
    faults.same("run", references(SIZE), twice=4 * 2)


@pytest.mark.slow
def test_crashes_with_progress_are_never_given_up(references):
    """Crash at a later step in each restart of a job, then resume."""
    for restart, step in enumerate((6, 11, 16, 21)):
        env = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restart)}
        faults.start(SIZE, hurt=(f"crash@{step}",), env=env)
    env = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "4"}
    faults.resume(SIZE, env=env)
    assert faults.begins("run") == [0, 5, 10, 16, 20]
    faults.same("run", references(SIZE), twice=3)


def test_nan_on_one_rank_ends_all_ranks_at_one_step(over, references):
    """Let the loss of one rank be NaN, then resume without it."""
    ended = faults.start(SIZE, *over, hurt=("nan@11:rank1",))
    assert all(isinstance(result, NonFiniteError) for result in ended.results), ended
    assert len({result.found for result in ended.results}) == 1
    assert ended.code == NonFiniteError.exit_code
    assert rundir.RunDirectory("run").steps()[-1] == 10
    faults.resume(SIZE, *over)
    assert faults.begins("run") == [0, 10]
    faults.same("run", references(SIZE, *over))


def test_fp16_resume_between_overflows(over, references):
    """Let fp16 steps overflow before and after a checkpoint, kill a rank, then resume."""
    overflow = ("overflow@9:always", "overflow@10:always", "overflow@11:always")
    options = (*over, "--precision", "fp16")
    faults.start(SIZE, *options, hurt=(*overflow, "kill@12:rank1"))
    faults.resume(SIZE, *options, hurt=overflow)
    assert faults.begins("run") == [0, 10]
    faults.same("run", references(SIZE, *options, hurt=overflow))


@pytest.mark.parametrize(
    ("kind", "context"), [("term", "fork"), *slow_cases(("usr2", "fork"), ("usr2", "spawn"))]
)
def test_preemption_signal_to_all_processes_spares_loader_workers(over, references, kind, context):
    """Send a signal to all processes of all ranks, loader workers included, then resume."""
    options = (*over, "--workers", "2", "--context", context)
    stopped = faults.start(SIZE, *options, *SLOW, hurt=(f"{kind}-all@3",))
    assert 3 < stopped_step(stopped) < 24
    faults.resume(SIZE, *options)
    faults.same("run", references(SIZE, *over), twice=0)


@pytest.mark.slow
@pytest.mark.e2e
def test_ctrl_c_saves_and_stops_and_twice_ends_at_once(references):
    """Press Ctrl-C once, resume, press it twice, and resume again; one process."""
    command = [sys.executable, survivor.__file__, *faults.OPTIONS, "--resume", *SLOW]

    def interrupt(step, times):
        process = subprocess.Popen(
            [*command, f"--fault=sleep=1@{step}"],
            env=launches.environ(),
            # Jobs in the background of a shell ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        try:
            mark = Path("run.faults", f"sleep=1@{step}-of-0")
            wait_until(mark.exists)
            os.kill(process.pid, signal.SIGINT)
            while times > 1 and process.poll() is None:  # two signals at once may count as one
                time.sleep(0.2)
                os.kill(process.pid, signal.SIGINT)
            return process.wait(120)
        finally:
            process.kill()
            process.wait()

    assert interrupt(3, 1) == exit_codes.STOPPED
    (saved,) = faults.last_steps("run").values()
    assert rundir.RunDirectory("run").steps()[-1] == saved
    assert 3 < saved < 16
    assert interrupt(saved + 2, 2) == -signal.SIGINT
    subprocess.run(command, env=launches.environ(), check=True)
    faults.same("run", references(1))
