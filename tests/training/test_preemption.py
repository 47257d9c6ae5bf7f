"""Preemption: signals, stop files and the time limit ask a run to stop."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from hpctrain.cluster.job import Allocation
from hpctrain.process import signals
from hpctrain.rundir import STOP_REASON, RunDirectory
from hpctrain.training.preemption import REASONS, Preemption, Stopped

NOW = 1_700_000_000


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def make_preemption(run):
    """Return a function that makes a Preemption in a run; handlers are restored at the end."""
    # Jobs in the background of a shell ignore SIGINT; these tests may be one.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (*signals.STOP, signal.SIGINT)}
    with ExitStack() as undo:

        def make(rank=0, env=None, job=None, in_run=True):
            made = Preemption(rank, env or {}, job, undo, clock=lambda: NOW)
            if in_run:
                made.opened()
                made.begin(run)
            return made

        yield make
    assert before == {number: signal.getsignal(number) for number in before}
    signal.signal(signal.SIGINT, found)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT"])
def test_signal_to_any_rank_requests_a_stop(make_preemption, name):
    preemption = make_preemption(rank=3)
    assert preemption.asked(save_margin=30.0) is None
    signal.raise_signal(getattr(signal, name))
    assert preemption.asked(save_margin=30.0) == name
    assert name in REASONS


def test_ignored_signal_stays_ignored(make_preemption):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        preemption = make_preemption()
        signal.raise_signal(signal.SIGINT)
        assert preemption.asked(save_margin=30.0) is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_second_ctrl_c_leaves_at_once(make_preemption):
    make_preemption()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


# With an exit status file, the job's script decides: after another failure it does not requeue.
@pytest.mark.parametrize(
    ("env", "code"), [({}, 75), ({"HPCTRAIN_EXIT_STATUS_FILE": "file"}, 128 + signal.SIGUSR2)]
)
def test_exit_code_of_a_signal_before_the_session_is_open(make_preemption, env, code):
    make_preemption(env=env, in_run=False)
    with pytest.raises(Stopped) as caught:
        signal.raise_signal(signal.SIGUSR2)
    assert (caught.value.code, caught.value.together) == (code, False)
    assert "SIGUSR2" in caught.value.reason


def test_second_signal_outside_of_a_run_ends_the_process(make_preemption):
    preemption = make_preemption()
    preemption.end()
    signal.raise_signal(signal.SIGUSR2)  # an open session needs this rank
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)
    preemption.close()
    signal.raise_signal(signal.SIGTERM)


def test_signal_before_the_run_stops_the_run(make_preemption, run):
    preemption = make_preemption(in_run=False)
    preemption.opened()
    signal.raise_signal(signal.SIGUSR2)
    preemption.begin(run)
    assert preemption.asked(save_margin=30.0) == "SIGUSR2"


def test_exit_code_is_0_if_there_is_an_exit_status_file():
    assert Stopped("", {"HPCTRAIN_EXIT_STATUS_FILE": "file"}).code == 0
    assert Stopped("", {}).code == 75


def test_preemption_ignores_an_unreadable_stop_file(make_preemption, run, caplog):
    preemption = make_preemption(env={"HPCTRAIN_STOP_FILE": "x" * 5000})
    assert preemption.asked(save_margin=30.0) is None
    run.stop.mkdir()
    assert preemption.asked(save_margin=30.0) == STOP_REASON
    preemption.obeyed(run)
    assert "the next start will stop as well" in caplog.text


def test_stop_files_are_read_by_rank_0_only(make_preemption, run, tmp_path):
    env = {"HPCTRAIN_STOP_FILE": str(tmp_path / "of-the-script")}
    first, other = make_preemption(env=env), make_preemption(rank=1, env=env)
    assert first.asked(save_margin=30.0) is None
    run.stop.touch()
    assert first.asked(save_margin=30.0) == STOP_REASON
    assert other.asked(save_margin=30.0) is None
    first.obeyed(run)
    assert not run.stop.exists()
    assert first.asked(save_margin=30.0) is None
    (tmp_path / "of-the-script").touch()
    assert first.asked(save_margin=30.0) == "a signal to the job"
    first.obeyed(run)  # the stop file of the script belongs to the script
    assert first.asked(save_margin=30.0) == "a signal to the job"


@pytest.mark.parametrize("env", [{}, {"HPCTRAIN_LAUNCHED": f"{NOW + 0.9}"}])
def test_stop_file_from_before_the_launch_does_not_stop_it(make_preemption, run, caplog, env):
    run.stop.touch()
    os.utime(run.stop, (NOW - 1, NOW - 1))
    preemption = make_preemption(env=env)
    assert preemption.asked(save_margin=30.0) is None
    assert not run.stop.exists()
    assert "stop is older than this launch" in caplog.text
    # One that is made while the launch begins, or later, by whatever clock, stops it.
    run.stop.touch()
    os.utime(run.stop, (NOW - 1, NOW - 1))
    assert preemption.asked(save_margin=30.0) == STOP_REASON
    os.utime(run.stop)
    assert make_preemption(env=env).asked(save_margin=30.0) == STOP_REASON


def test_time_limit_requests_a_stop_one_save_margin_ahead(make_preemption):
    soon = Allocation("slurm", "7", end_time=NOW + 60)
    assert make_preemption(job=soon).asked(save_margin=59.0) is None
    assert make_preemption(job=soon).asked(save_margin=60.0) == "the end of the job's time"
    assert make_preemption(rank=1, job=soon).asked(save_margin=60.0) is None


def test_late_preempt_signal_is_a_warning_with_a_better_lead(make_preemption, caplog):
    soon = Allocation("slurm", "7", end_time=NOW + 60)
    preemption = make_preemption(job=soon)
    signal.raise_signal(signal.SIGUSR2)
    preemption.asked(save_margin=100.0)
    assert "SIGUSR2 came 60 s before the end of the job's time" in caplog.text
    assert "#SBATCH --signal=B:USR2@160 leaves enough" in caplog.text


def test_earlier_signal_handler_is_called_after_the_session_on_rank_0():
    calls = []
    for number in signals.STOP:
        signal.signal(number, lambda number, frame: calls.append(number))
    try:
        for rank in (0, 1):
            with ExitStack() as undo:
                preemption = Preemption(rank, {}, None, undo)
                preemption.opened()
                preemption.begin(RunDirectory("run"))
                signal.raise_signal(signal.SIGUSR2)
            assert len(calls) == rank
            preemption.hand_on()
            assert calls == [signal.SIGUSR2]
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR2, signal.SIGUSR1]
    finally:
        for number in signals.STOP:
            signal.signal(number, signal.SIG_DFL)


def test_preempt_signals_reach_the_rank_and_not_its_children():
    received = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        with signals.blocked():
            child = subprocess.Popen(
                [sys.executable, "-c", "print(input())"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            # To this thread: threads of other tests in this process could receive it.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            assert received == []
        assert received == [signal.SIGUSR2]
        for number in (*signals.STOP, signal.SIGINT):
            child.send_signal(number)
        output, _ = child.communicate(b"alive\n", timeout=60)
        assert output == b"alive\n"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_loader_worker_ends_by_sigterm_of_its_parent_only():
    lines = (
        "import os, signal, subprocess, sys, time\n"
        "from hpctrain.process import signals\n"
        "signals.obey_parent(int(sys.argv[1]))\n"
        "subprocess.run(['kill', '-TERM', str(os.getpid())])\n"
        "while signal.SIGTERM in signal.sigpending(): time.sleep(0.01)\n"  # two count as one
        "print('alive', flush=True)\n"
        "time.sleep(600)\n"
    )
    with signals.blocked():
        command = [sys.executable, "-c", lines, str(os.getpid())]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"alive\n"
    child.terminate()
    assert child.wait(60) == 0
    child.stdout.close()


@pytest.mark.slow
@pytest.mark.e2e
def test_error_in_a_loader_worker_is_reported_last():
    """The exit code must be 0: else torch reports workers that it ended itself as failed."""
    lines = (
        "import hpctrain\n"
        "from torch.utils.data import Dataset\n"
        "class Broken(Dataset):\n"
        "    def __len__(self): return 400\n"
        "    def __getitem__(self, index): raise hpctrain.errors.DataError('broken')\n"
        "with hpctrain.Session(workers=6, global_batch=4) as session:\n"
        "    for batch in session.loader(Broken()): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "broken" in done.stderr
    assert "exited unexpectedly" not in done.stderr
    assert "Traceback" not in done.stderr


def test_loader_worker_without_parent_exits_with_143():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    lines = (
        "import sys, time\n"
        "from hpctrain.process import signals\n"
        "signals._SECONDS_BETWEEN_CHECKS = 0.01\n"
        "signals.obey_parent(int(sys.argv[1]))\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", lines, str(ended.pid)], timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
