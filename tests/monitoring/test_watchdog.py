"""Watchdog: a hang ends the run and names its rank; a run that works is never ended.

Most ranks here are real, and their helpers run in this process, on a clock that the test moves.
"""

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
import pytest
from clock import Clock
from processes import until

from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.distributed.flight_recorder import FlightRecorder
from hpctrain.cluster import system
from hpctrain.cluster.world import World
from hpctrain.errors import exit_codes
from hpctrain.monitoring.watchdog import Watchdog, evidence, loop, shared_memory, watched_rank
from hpctrain.monitoring.watchdog import rank as rank_module
from hpctrain.monitoring.watchdog.blame import Sighting, apart, judge, suspended
from hpctrain.monitoring.watchdog.helper_exchange import Aside, HelperExchange
from hpctrain.monitoring.watchdog.limits import Limits
from hpctrain.monitoring.watchdog.watched_rank import WatchedRank, dump_collectives
from hpctrain.process.heartbeat import Heartbeat
from hpctrain.process.phases import (
    ACCUMULATING,
    BACKWARD,
    CLOSED,
    COMPUTING,
    EVALUATING,
    IDLE,
    LOADING,
    SAVING,
    UPDATING,
    WAITING,
)
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.exit_status import read_exit_status

SECONDS = 60  # a limit for hanging tests; each takes a moment
TIMEOUT = 20.0  # without a heartbeat; the helper checks once a second

# A rank without torch. It begins its third step when all ranks are ready, calls the function that
# the test names, and makes a file when it does.
RANK = """
import ctypes, json, multiprocessing, os, signal, sys, threading, time
from pathlib import Path
from hpctrain.rundir import RunDirectory
from hpctrain.monitoring.watchdog import Watchdog, rank
from hpctrain.process.heartbeat import Heartbeat
from hpctrain.process.phases import BACKWARD, COMPUTING, EVALUATING, IDLE, LOADING
from hpctrain.cluster.world import World

place, how, present, timeout, least, key, driven = json.loads(sys.argv[1])
if driven:
    rank._start = lambda path: None
world = World(**place)
exit_status_file = "exit-status" if world.rank == 0 else None
heartbeat = Heartbeat()
watchdog = Watchdog(world, timeout, least, RunDirectory("run"), key, exit_status_file, heartbeat)
heartbeat.step = 3

def mark_started():
    Path(f"started-{world.rank}").touch()

def wait_for_the_others():
    heartbeat.enter(BACKWARD)
    mark_started()
    threading.Event().wait()

def hold_the_gil():
    mark_started()
    while True:  # the signal that asks for the stack ends a sleep
        ctypes.PyDLL(None).sleep(1000)

def loop_forever():
    mark_started()
    while True:
        pass

def load():
    heartbeat.enter(LOADING)
    mark_started()
    threading.Event().wait()

def wait_in_a_debugger():
    exec(compile("wait_in_the_script()", "/lib/python3/pdb.py", "exec"))

def wait_in_the_script():
    mark_started()
    threading.Event().wait()

def stop():
    mark_started()
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()  # it runs for a moment, to show its stack

def stop_in_the_sums():
    heartbeat.enter(BACKWARD)
    stop()

def stop_in_the_first_evaluation():
    heartbeat.enter(EVALUATING)
    stop()

def wait_in_the_first_evaluation():
    heartbeat.enter(EVALUATING)
    mark_started()
    threading.Event().wait()

def fork(target, *arguments):
    worker = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    heartbeat.enter(EVALUATING)
    worker.start()
    Path("worker").write_text(str(worker.pid))
    mark_started()
    worker.join()

def fork_a_worker_that_never_runs():
    held = threading.Lock()
    held.acquire()
    os.register_at_fork(after_in_child=held.acquire)
    fork(print)

def fork_a_worker_that_waits():
    fork(threading.Event().wait)

def die():
    mark_started()
    os._exit(9)

def leave():
    watchdog.close()
    mark_started()
    os._exit(0)

def wait_idle():
    heartbeat.enter(IDLE)
    mark_started()
    while not Path("finish").exists():
        time.sleep(0.01)

def work():
    mark_started()
    while not Path("finish").exists():
        heartbeat.enter(COMPUTING)
        time.sleep(0.01)

Path(f"ready-{world.rank}").touch()
while not all(Path(f"ready-{name}").exists() for name in present):
    time.sleep(0.01)
for _ in range(8 if least else 0):  # the time-outs of these phases are learnt
    for phase in (LOADING, COMPUTING, BACKWARD):
        heartbeat.enter(phase)
heartbeat.enter(COMPUTING)
globals()[how]()
watchdog.close()
"""


class Start:
    """The ranks of one start, their helpers, logs and shared folders."""

    def __init__(self, folder, how, layout, timeout, least=None, absent=(), driven=False):
        self.folder, self.layout, self.how = folder, layout, how
        self.key = secrets.token_hex(8)
        self.directory = RunDirectory(folder / "run")
        self.directory.path.mkdir(exist_ok=True)
        self.ranks = {}
        hosts = tuple(f"node{n + 1}" for n in range(len(layout)))
        places = [(node, local) for node, tasks in enumerate(layout) for local in range(tasks)]
        present = [rank for rank in range(len(places)) if rank not in absent]
        self.output = folder / "output"
        with self.output.open("ab") as output:
            for rank in present:
                node, local = places[rank]
                place = {
                    "rank": rank,
                    "world_size": len(places),
                    "local_rank": local,
                    "local_world_size": layout[node],
                    "node_rank": node,
                    "num_nodes": len(layout),
                    "hosts": hosts,
                }
                awaited = [*present, "go"] if driven else present
                arguments = json.dumps(
                    [place, how[rank], awaited, timeout, least, self.key, driven]
                )
                self.ranks[rank] = subprocess.Popen(
                    [sys.executable, "-c", RANK, arguments], cwd=folder, stderr=output
                )

    def shared(self):
        return [
            shared_memory.FOLDER / shared_memory.name(self.key, node)
            for node in range(len(self.layout))
        ]

    def helpers(self):
        """Return the process ids of the helpers."""
        return [pid for folder in self.shared() for pid in processes.having(folder)]

    def await_ready(self):
        """Wait until all ranks have their slots."""
        until(lambda: all((self.folder / f"ready-{rank}").exists() for rank in self.ranks))

    def await_started(self):
        """Wait until all ranks run their function."""
        until(lambda: all((self.folder / f"started-{rank}").exists() for rank in self.ranks))
        for rank, process in self.ranks.items():
            if self.how[rank].startswith("stop"):
                until(lambda pid=process.pid: state(pid) == "T")
            elif self.how[rank] in ("die", "leave"):
                until(lambda pid=process.pid: state(pid) == "Z")

    def in_the_loop(self):
        """Wait until all ranks run their function, and all helpers run."""
        self.await_started()
        logs = [self.directory.logs / f"watch-node{n + 1}.log" for n in range(len(self.layout))]
        until(lambda: all(log.exists() for log in logs))

    def end(self):
        """Wait for the end of ranks and helpers; return the exit codes of the ranks."""
        try:
            codes = [process.wait(SECONDS) for process in self.ranks.values()]
            until(lambda: not self.helpers())
        finally:
            for process in self.ranks.values():
                process.kill()
                process.wait()
        assert not [folder for folder in self.shared() if folder.exists()]
        return codes

    def log(self, host="node1"):
        return (self.directory.logs / f"watch-{host}.log").read_text()

    def reason(self):
        code, reason = read_exit_status(self.folder / "exit-status")
        assert code == exit_codes.FAILED
        return reason


def state(pid):
    """Return the state of a process: its letter in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class WatchedRanks:
    """Ranks, and the helpers of their hosts in this process, on a clock that the test moves."""

    def __init__(self, ranks):
        self.ranks, self.clock = ranks, Clock(time.monotonic)
        ranks.await_ready()
        folders = [folder for folder in ranks.shared() if folder.exists()]
        self.helpers = [loop.Watch(folder, self.clock) for folder in folders]
        self._open = list(self.helpers)
        self.advance(0.0)
        (ranks.folder / "ready-go").touch()
        ranks.await_started()

    def advance(self, seconds=1.0):
        """Move the clock, and let each helper check once; helpers without ranks end."""
        self.clock.move(seconds)
        self.helpers = [helper for helper in self.helpers if not helper.turn()]

    def await_heartbeats(self, *local_ranks):
        """Wait for a heartbeat of each rank, or of those with the given local ranks."""
        ranks = [each for helper in self.helpers for each in helper._ranks.items()]
        for one in (one for local, one in ranks if not local_ranks or local in local_ranks):
            before = shared_memory.PLACE.pack(*self._seen(one))
            until(
                lambda one=one, before=before: os.pread(one.file, len(before), one.start) != before
            )

    @staticmethod
    def _seen(one):
        return one.step, one.phase, one.heartbeat, one.count

    def end(self):
        """Move the clock until the helpers have ended; return the exit codes of the ranks."""
        for _ in range(3 * int(TIMEOUT)):
            self.advance()
        assert not self.helpers, "the helpers still wait"
        return self.ranks.end()

    def finish(self):
        """Let the ranks finish; return their exit codes."""
        assert all(process.poll() is None for process in self.ranks.ranks.values())
        (self.ranks.folder / "finish").touch()
        until(lambda: all(process.poll() is not None for process in self.ranks.ranks.values()))
        self.advance()
        assert not self.helpers
        return self.ranks.end()

    def close(self):
        for helper in self._open:
            os.close(helper._file)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts ranks, and helpers as separate processes."""
    started = []

    def launch(*how, layout=None, timeout=1800.0, **more):
        started.append(Start(tmp_path, how, layout or (len(how),), timeout, **more))
        return started[-1]

    yield launch
    for one in started:
        for process in one.ranks.values():
            process.kill()
            process.wait()


@pytest.fixture
def watched(start, monkeypatch):
    """Return a function that starts ranks whose helpers run in this process."""
    monkeypatch.setattr(loop, "_SECONDS_TO_AGREE", 0.0)
    made = []

    def launch(*how, **more):
        made.append(WatchedRanks(start(*how, timeout=TIMEOUT, driven=True, **more)))
        return made[-1]

    yield launch
    for one in made:
        one.close()


WAIT = "wait_for_the_others"


@pytest.mark.parametrize(
    ("how", "found", "stack"),
    [
        (
            "stop_in_the_sums",
            "at step 3, in the backward pass, its sums or the update: process {} is stopped "
            "(state T)",
            "in stop_in_the_sums",
        ),
        ("hold_the_gil", "at step 3, in the script's code", "in hold_the_gil"),
        ("loop_forever", "at step 3, in the script's code", "in loop_forever"),
        ("load", "at step 3, waits for data", "in load"),
    ],
)
def test_hanging_rank_is_named_and_every_stack_is_shown(watched, capsys, how, found, stack):
    """Let one rank hang in a step; name it, show every stack, and end all ranks."""
    job = watched(WAIT, WAIT, how)
    ranks = job.ranks
    assert job.end() == [-signal.SIGKILL] * 3
    reason = ranks.reason()
    pid = ranks.ranks[2].pid
    silence = re.match(r"rank 2 on node1: silent for ([0-9]+) s ", reason)
    assert reason.removeprefix(silence[0]) == found.format(pid)
    assert TIMEOUT <= int(silence[1]) <= TIMEOUT + 2
    output = capsys.readouterr().err
    assert output.startswith(f"hpctrain: error: {reason}\n  expected: ")
    assert "\n  fix:      " in output
    assert re.search(r"\n  or:       .*\n  more:     hpctrain explain HT65[89]\n", output)
    for text in (ranks.log(), output):
        assert f"hpctrain: error: {reason}\n" in text
        assert [text.count(f"\nrank {rank}: silent for") for rank in range(3)] == [1, 1, 1]
        assert text.count("in wait_for_the_others") == 2
        assert text.count(f"{stack}\n") == 1
    assert not list(ranks.directory.path.glob(".*"))


@pytest.mark.parametrize(
    ("how", "early", "layout"),
    [
        ("wait_in_the_script", True, (3,)),
        ("stop", True, (2, 1)),
        pytest.param("loop_forever", False, (3,), marks=pytest.mark.slow),
        ("wait_in_a_debugger", False, (3,)),
    ],
)
def test_hang_ends_after_the_learnt_timeout_unless_the_rank_computes(
    watched, monkeypatch, capsys, how, early, layout
):
    """Let one rank hang, compute or wait in a debugger, after some steps."""
    monkeypatch.setattr(watched_rank, "_SECONDS_BETWEEN_ASKS", 0.0)
    job = watched(WAIT, WAIT, how, layout=layout, least=8)
    monkeypatch.setattr(evidence, "monotonic", job.clock)
    used, pid = 0.0, job.ranks.ranks[2].pid
    ranks = [one for helper in job.helpers for one in helper._ranks.values()]
    for _ in range(4 * int(TIMEOUT)):
        job.advance(0.4)
        until(
            lambda: all(one.stack() for one in ranks if one._asked and one.state not in ("T", ""))
        )
        if how == "loop_forever" and job.helpers:
            until(lambda used=used: system.stat(pid).seconds > used or not system.stat(pid).state)
            used = system.stat(pid).seconds + 0.1
    assert not job.helpers
    assert job.ranks.end() == [-signal.SIGKILL] * 3
    reason = job.ranks.reason()
    assert reason.startswith(f"rank 2 on node{len(layout)}: silent for ")
    silence = int(re.search("silent for ([0-9]+) s", reason)[1])
    output = capsys.readouterr().err
    if early:
        assert 8 <= silence < TIMEOUT
        assert (
            "expected: a heartbeat from every rank; here at most 8 s of silence: adaptive "
            in output
        )
        assert "export HPCTRAIN_LEAST_TIMEOUT=SECONDS" in output
    else:
        assert silence >= TIMEOUT
        assert f"at most {TIMEOUT:g} s of silence (--timeout)" in output


@pytest.mark.parametrize("layout", [(3,), (2, 1)])
def test_stopped_rank_ends_the_run_soon_in_a_phase_of_which_nothing_is_learnt(
    watched, monkeypatch, capsys, layout
):
    """Stop one rank in the first evaluation, in which the others wait for it."""
    waits = "wait_in_the_first_evaluation"
    job = watched(waits, waits, "stop_in_the_first_evaluation", layout=layout, least=8)
    monkeypatch.setattr(evidence, "monotonic", job.clock)
    for _ in range(int(TIMEOUT)):
        job.advance(0.9)
    assert not job.helpers
    assert job.ranks.end() == [-signal.SIGKILL] * 3
    reason = job.ranks.reason()
    assert reason.startswith(f"rank 2 on node{len(layout)}: silent for ")
    assert reason.endswith("is stopped (state T)")
    assert 8 <= int(re.search("silent for ([0-9]+) s", reason)[1]) < TIMEOUT - 2
    assert "a process stopped for at most 8 s" in capsys.readouterr().err


@pytest.fixture
def usual(start, monkeypatch):
    """Return a function that starts ranks with the usual time-outs, on a clock of the test."""
    monkeypatch.setattr(loop, "_SECONDS_TO_AGREE", 0.0)
    made = []

    def launch(*how, **more):
        made.append(WatchedRanks(start(*how, driven=True, **more)))
        monkeypatch.setattr(evidence, "monotonic", made[-1].clock)
        return made[-1]

    yield launch
    for one in made:
        one.close()
        with contextlib.suppress(OSError):
            os.kill(int((one.ranks.folder / "worker").read_text()), signal.SIGKILL)


WARNING = "hpctrain: warning: no process of the ranks on node"


@pytest.mark.parametrize("layout", [(2,), (1, 1)])
def test_worker_that_never_runs_is_named_within_a_minute(usual, capsys, layout):
    """Fork a worker that blocks before its first line, in the first evaluation."""
    job = usual("wait_in_the_first_evaluation", "fork_a_worker_that_never_runs", layout=layout)
    worker = int((job.ranks.folder / "worker").read_text())
    # Its fork ends in real time, and the helpers count seconds of the test.
    stat = Path(f"/proc/{worker}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
    for _ in range(60):
        job.advance()
    assert not job.helpers
    assert job.ranks.end() == [-signal.SIGKILL] * 2
    until(lambda: not system.started(worker))
    reason = job.ranks.reason()
    silence = re.match(
        rf"rank 1 on node{len(layout)}: silent for (\d+) s at step 3, in an eval", reason
    )
    assert 30 <= int(silence[1]) < 60
    assert f"worker process {worker} waits for a lock inside of its fork" in reason
    output = capsys.readouterr().err
    assert "expected: a worker that runs as soon as it is forked" in output
    assert WARNING not in output


def test_idle_ranks_are_reported_once_and_not_ended(usual, capsys):
    """Let all ranks wait, one of them for a worker that waits for a task."""
    job = usual("wait_in_the_first_evaluation", "fork_a_worker_that_waits")
    for _ in range(120):
        job.advance()
    assert job.helpers
    output = capsys.readouterr().err
    assert output.count(WARNING) == 1
    assert "has used a processor for 40 s\n  rank 0: silent for 4" in output
    assert re.search(r"rank 1: .* in an evaluation; process .*; in \w+ \(popen_fork.py, ", output)
    assert not (job.ranks.folder / "exit-status").exists()
    assert output.split("\n", 1)[0] in job.ranks.log()


@pytest.mark.parametrize("how", ["work", "loop_forever", "stop", "wait_in_a_debugger"])
def test_no_warning_if_a_rank_works_or_is_held(usual, monkeypatch, capsys, how):
    monkeypatch.setattr(evidence, "POLLING", 0.01)  # the clock of the test is fast
    job = usual("wait_in_the_first_evaluation", how)
    pid = job.ranks.ranks[1].pid
    for _ in range(55):
        if how == "loop_forever":
            used = system.stat(pid).seconds
            until(lambda used=used: system.stat(pid).seconds > used + 0.1)
        elif how == "work":
            job.await_heartbeats(1)
        job.advance()
    assert WARNING not in capsys.readouterr().err


def test_dead_rank_is_named_by_the_watchdog(watched):
    """End one rank without notice; name it, and end the ranks that wait for it."""
    job = watched(WAIT, "die", WAIT)
    assert sorted(job.end()) == [-signal.SIGKILL, -signal.SIGKILL, 9]
    assert job.ranks.reason().startswith(
        "rank 1 on node1: process ended, last seen at step 3, in the script's code; the other ranks"
    )
    assert f"rank 1 is gone, process {job.ranks.ranks[1].pid}" in job.ranks.log()


def test_rank_that_left_the_run_is_named(watched):
    """Let one rank leave the run early; name it, and end the ranks that wait for it."""
    job = watched(WAIT, "leave", WAIT)
    assert sorted(job.end()) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    reason = job.ranks.reason()
    assert reason.startswith("ranks 0 and 2 on node1: waiting, silent for")
    assert reason.endswith("; no longer in the run: rank 1 on node1")


def test_hang_in_which_all_ranks_wait_names_none(watched):
    """Let all ranks wait in the backward pass; end them, and name none."""
    job = watched(WAIT, WAIT, WAIT)
    # Before, a rank may still be in the call that says that it has started.
    for process in job.ranks.ranks.values():
        until(lambda pid=process.pid: "futex" in Path(f"/proc/{pid}/wchan").read_text())
    assert job.end() == [-signal.SIGKILL] * 3
    assert job.ranks.reason().startswith("all 3 ranks are silent for")
    assert job.ranks.reason().endswith("the update: they wait for each other")


def test_single_process_that_hangs_is_ended(watched):
    """Let a run of one process hang; end it."""
    job = watched("loop_forever")
    assert job.end() == [-signal.SIGKILL]
    assert job.ranks.reason().startswith("rank 0 on node1: silent for")


@pytest.mark.parametrize("how", ["loop_forever", "stop"])
def test_helpers_of_several_hosts_name_the_same_rank(watched, how):
    """Let one rank hang on three hosts; the helpers of all hosts name the same rank."""
    job = watched(WAIT, WAIT, WAIT, how, layout=(2, 1, 1))
    ranks = job.ranks
    assert job.end() == [-signal.SIGKILL] * 4
    reason = ranks.reason()
    assert reason.startswith("rank 3 on node3: silent for")
    for host in ("node1", "node2", "node3"):
        assert f"hpctrain: error: {reason}\n" in ranks.log(host)
    assert "in wait_for_the_others" in ranks.log("node2")
    assert f"in {how}\n" in ranks.log("node3")
    assert "node3: rank 3: silent for" in ranks.log("node1")


@pytest.mark.slow
def test_helper_processes_end_a_hang_and_the_next_start_removes_what_they_left(start):
    """Let one rank hang on three hosts with real helper processes; start again afterwards."""
    ranks = start(WAIT, WAIT, WAIT, "loop_forever", layout=(2, 1, 1), timeout=3.0)
    assert ranks.end() == [-signal.SIGKILL] * 4
    reason = ranks.reason()
    assert reason.startswith("rank 3 on node3: silent for")
    for host in ("node1", "node2", "node3"):
        assert f"hpctrain: error: {reason}\n" in ranks.log(host)
    assert f"hpctrain: error: {reason}\n" in ranks.output.read_text()
    assert len(list(ranks.directory.path.glob(".hang-*"))) == 1
    again = start("work", layout=(1,))
    again.in_the_loop()
    until(lambda: not list(again.directory.path.glob(".hang-*")))
    (again.folder / "finish").touch()
    assert again.end() == [0]


def test_host_without_observations_is_named(watched):
    """Let the helper of one host report nothing; name the rank and the host."""
    job = watched(WAIT, WAIT, WAIT, layout=(2, 1), absent=(2,))
    assert job.end() == [-signal.SIGKILL] * 2
    assert "no observation of rank 2 (node2)" in job.ranks.reason()


def test_ranks_without_heartbeats_outside_of_the_loop_are_not_ended(watched, capsys):
    """Send no heartbeats outside of the loop for three time-outs; the run continues."""
    job = watched("wait_idle", "wait_idle", "wait_idle")
    for _ in range(3 * int(TIMEOUT)):
        job.advance()
    assert job.finish() == [0, 0, 0]
    assert capsys.readouterr().err == job.ranks.output.read_text() == ""
    assert not (job.ranks.folder / "exit-status").exists()


def test_timeout_counts_from_the_last_heartbeat(watched):
    """Stop a rank three times for less than the time-out; the run continues."""
    job = watched("work", "work", "work")
    pid = job.ranks.ranks[1].pid
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T")
        for _ in range(int(TIMEOUT) - 5):
            job.advance()
        os.kill(pid, signal.SIGCONT)
        job.await_heartbeats()
        job.advance()
    assert job.finish() == [0, 0, 0]
    assert not (job.ranks.folder / "exit-status").exists()


@pytest.mark.parametrize(
    ("layout", "helper_too"), [((2,), True), ((2,), False), ((1, 1), True), ((1, 1), False)]
)
def test_suspended_job_continues(watched, capsys, layout, helper_too):
    """Stop all ranks, with or without their helper, and continue them; the run continues."""
    job = watched("work", "work", layout=layout)
    pids = [process.pid for process in job.ranks.ranks.values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(state(pid) == "T" for pid in pids))
    for _ in () if helper_too else range(3 * int(TIMEOUT)):
        job.advance()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    job.advance(3 * TIMEOUT)
    assert job.finish() == [0, 0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("helper_too", [True, False])
def test_killed_ranks_leave_no_helper_and_no_shared_memory(start, helper_too):
    """Kill all ranks, with or without their helper; no helper and no shared memory remain."""
    ranks = start("work", "work")
    ranks.in_the_loop()
    until(lambda: not any(folder.exists() for folder in ranks.shared()))
    helpers = ranks.helpers()
    assert len(helpers) == 1
    for helper in helpers if helper_too else ():
        os.kill(helper, signal.SIGKILL)
    for process in ranks.ranks.values():
        process.kill()
    assert ranks.end() == [-signal.SIGKILL] * 2
    assert not (ranks.folder / "exit-status").exists()


def test_helper_ignores_signals_to_the_job_and_shares_the_session_of_the_ranks(start):
    """Send signals to the helper; it is in the session, not the process group, of the ranks."""
    ranks = start("work", "work")
    ranks.in_the_loop()
    (helper,) = ranks.helpers()
    pids = [process.pid for process in ranks.ranks.values()]
    assert os.getsid(helper) in map(os.getsid, pids)
    assert os.getpgid(helper) not in map(os.getpgid, pids)
    for number in ("TERM", "INT", "HUP", "QUIT", "TTOU", "USR1", "USR2", "ALRM", "XCPU"):
        os.kill(helper, getattr(signal, f"SIG{number}"))
    ranks.ranks[1].kill()
    until(lambda: f"rank 1 is gone, process {pids[1]}" in ranks.log())
    (ranks.folder / "finish").touch()
    assert ranks.end() == [0, -signal.SIGKILL]


def test_run_continues_without_its_helper(start):
    """Kill the helper; the run continues."""
    ranks = start("work", "work")
    ranks.in_the_loop()
    until(lambda: not any(folder.exists() for folder in ranks.shared()))
    for helper in ranks.helpers():
        os.kill(helper, signal.SIGKILL)
    (ranks.folder / "finish").touch()
    assert ranks.end() == [0, 0]


def test_hanging_file_system_stops_no_helper(watched, tmp_path, capsys, monkeypatch):
    """Let writes to the helper's log block; the helper still ends the hang."""
    monkeypatch.setattr(loop, "_SECONDS_FOR_FILES", 0.1)
    job = watched(WAIT, "loop_forever")
    log = tmp_path / "run" / "logs" / "watch-node1.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(log)
    pipe = os.open(log, os.O_RDWR)
    fill_pipe(pipe)  # without a reader, a write blocks for ever
    assert job.end() == [-signal.SIGKILL] * 2
    os.read(pipe, 1 << 20)  # the blocked write continues
    os.close(pipe)
    assert "hpctrain: error: rank 1 on node1: silent" in capsys.readouterr().err


def fill_pipe(pipe):
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 16))
    os.set_blocking(pipe, True)


def test_launcher_that_does_not_read_stops_no_helper(watched, monkeypatch):
    """Fill the pipe to the launcher; the helper still ends the hang."""
    reader, writer = os.pipe()
    fill_pipe(writer)
    job = watched(WAIT, "loop_forever")
    monkeypatch.setattr(loop, "_write_error", lambda text: os.write(writer, text.encode()))
    monkeypatch.setattr(job.helpers[0], "_standard_error", Aside(0.1))
    assert job.end() == [-signal.SIGKILL] * 2
    os.close(reader)  # the blocked write gets an error
    os.close(writer)
    assert job.ranks.reason().startswith("rank 1 on node1")


def single_watchdog(tmp_path, heartbeat, timeout=1800.0):
    world, directory = World(0, 1, 0, 1, 0, 1, ("node1",)), RunDirectory(tmp_path / "run")
    return Watchdog(world, timeout, None, directory, secrets.token_hex(8), None, heartbeat)


def test_helper_of_ranks_that_have_left_ends_without_a_word(tmp_path):
    """Remove the shared memory before the helper opens it; the helper ends."""
    helper = Path(loop.__file__).with_name("helper.py")
    command = [sys.executable, "-S", "-P", helper, tmp_path / "removed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_close_waits_for_the_helper_and_leaves_nothing(tmp_path, monkeypatch):
    """Close the watchdog; the helper has ended and its shared memory is removed."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    monkeypatch.setattr(rank_module, "_SECONDS_TO_LEAVE", SECONDS)
    for _ in range(3):
        heartbeat = Heartbeat()
        watchdog = single_watchdog(tmp_path, heartbeat)
        heartbeat.enter(COMPUTING)
        watchdog.close()
        watchdog.close()
        heartbeat.enter(COMPUTING)  # without a helper
        assert not list(tmp_path.glob("hpctrain-watch-*"))


def take(name, local_rank, settings=None):
    facts = shared_memory.Facts(local_rank, os.getpid(), 0)
    return shared_memory.Part(name, local_rank, facts, settings or {})


def test_ranks_of_a_host_share_a_private_file(tmp_path, monkeypatch):
    """Start two ranks; the first makes the file, and both write their facts into it."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    parts = [take("start", rank, {"a": 1}) for rank in (0, 1)]
    assert [part.new for part in parts] == [True, False]
    assert (tmp_path / "start").stat().st_mode & 0o777 == 0o600
    with (tmp_path / "start").open("rb") as file:
        assert shared_memory.read_settings(file.fileno()) == {"a": 1}
        found = [shared_memory.read_facts(file.fileno(), rank) for rank in (0, 1, 2)]
        assert [facts and facts.rank for facts in found] == [0, 1, None]
    for part in parts:
        part.leave()
        part.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "start"]


def test_run_without_shared_memory_continues_with_a_warning(tmp_path, monkeypatch, caplog):
    """Start without any folder for shared memory; the run continues without a watchdog."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(rank_module.logger, "propagate", True)
    heartbeat = Heartbeat()
    watchdog = single_watchdog(tmp_path, heartbeat)
    assert "no watchdog on node1" in caplog.text
    heartbeat.enter(COMPUTING)
    watchdog.close()


def test_shared_memory_of_another_user_is_refused(tmp_path, monkeypatch):
    """Make the file of the heartbeats, readable for other users, before the start."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o644)  # whatever the umask is
    with pytest.raises(PermissionError):
        take("open", 0)


def test_shared_memory_of_dead_starts_is_removed(tmp_path, monkeypatch):
    """Leave shared memory of a dead and a live start; remove only that of the dead one."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    dead, live = (shared_memory.name(key, 0) for key in ("dead", "live"))
    take(dead, 0).close()
    part = take(live, 0)
    shared_memory.remove_stale()
    assert list(tmp_path.iterdir()) == [tmp_path / live]
    part.close()


def test_rank_that_begins_while_its_file_is_removed_makes_a_new_one(tmp_path, monkeypatch):
    """Open the file of a start while a helper removes it; the rank creates it again."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    take("start", 0).close()
    with (tmp_path / "start").open("rb") as file:
        assert shared_memory.is_unused(file.fileno())
        parts = []
        thread = threading.Thread(target=lambda: parts.append(take("start", 1)))
        thread.start()  # it waits for the lock
        (tmp_path / "start").unlink()
    thread.join(SECONDS)
    assert parts[0].new
    assert (tmp_path / "start").exists()
    parts[0].close()


def at(rank, phase, state="S", step=3, host="node1"):
    """Return the observation of a rank in a phase."""
    return Sighting(rank, host, step, phase, 60.0, 100 + rank, state, "rpc_wait")


GONE, STOPPED, SILENT, NETWORK, ELSEWHERE = "HT657", "HT658", "HT659", "HT660", "HT661"
NOTHING_SEEN = "no observation of rank 2 (node2)"


@pytest.mark.parametrize(
    ("sightings", "ranks", "code", "words"),
    [
        ([at(0, BACKWARD), at(1, BACKWARD), at(2, COMPUTING)], (2,), SILENT, "the script's code"),
        ([at(0, COMPUTING), at(1, COMPUTING, step=2), at(2, BACKWARD)], (1,), SILENT, "step 2"),
        ([at(0, BACKWARD), at(1, BACKWARD, "T"), at(2, LOADING)], (1,), STOPPED, "(state T)"),
        ([at(0, BACKWARD), at(1, BACKWARD, "t"), at(2, BACKWARD)], (1,), STOPPED, "by a debugger"),
        ([at(0, BACKWARD, "T"), at(1, COMPUTING, ""), at(2, LOADING)], (1,), GONE, "process ended"),
        ([at(0, EVALUATING), at(1, IDLE), at(2, EVALUATING)], (1,), SILENT, "outside of the run's"),
        ([at(0, SAVING, "D"), at(1, SAVING), at(2, SAVING)], (0,), SILENT, "in rpc_wait (state D)"),
        ([at(0, LOADING, "D"), at(1, LOADING, "D"), at(2, LOADING)], (0, 1), SILENT, "0 and 1"),
        ([at(0, LOADING), at(1, LOADING), at(2, LOADING)], (), SILENT, "all 3 ranks are"),
        ([at(0, BACKWARD), at(1, BACKWARD), at(2, BACKWARD)], (), NETWORK, "wait for each other"),
        ([at(0, BACKWARD), at(1, CLOSED, ""), at(2, BACKWARD)], (1,), ELSEWHERE, "no longer in"),
        ([at(0, SAVING), at(1, CLOSED), at(2, COMPUTING)], (2,), SILENT, "rank 2"),
        ([at(0, LOADING), at(1, CLOSED), at(2, CLOSED, "")], (0,), SILENT, "rank 0 on"),
        ([at(0, BACKWARD), at(1, BACKWARD)], (2,), NETWORK, NOTHING_SEEN),
        ([at(0, COMPUTING), at(1, BACKWARD)], (0,), SILENT, NOTHING_SEEN),
        ([at(0, LOADING), at(1, LOADING)], (0, 1), SILENT, NOTHING_SEEN),
    ],
)
def test_hang_names_the_right_ranks(sightings, ranks, code, words):
    """Decide from the observations of the helpers which ranks caused a hang, and its kind."""
    blame = judge(sightings, 3, ("node1", "node2") if len(sightings) < 3 else ("node1",))
    error = blame.error("")
    assert (blame.ranks, error.code) == (ranks, code)
    assert words in error.found
    assert error.fixes
    assert "\n" not in "".join((error.found, *error.fixes))


@pytest.mark.parametrize(
    ("sightings", "blamed"),
    [
        ([at(0, BACKWARD), at(1, WAITING), at(2, UPDATING)], (1,)),
        ([at(0, WAITING, step=2), at(1, BACKWARD), at(2, WAITING, step=2)], (1,)),
        ([at(0, BACKWARD), at(1, WAITING, step=4), at(2, BACKWARD)], None),  # these may come
        ([at(0, BACKWARD), at(1, EVALUATING), at(2, BACKWARD)], None),  # rank 1 may
        ([at(0, BACKWARD), at(1, SAVING), at(2, BACKWARD)], None),
        ([at(0, BACKWARD), at(1, WAITING), at(2, COMPUTING)], None),
        ([at(0, ACCUMULATING), at(1, WAITING), at(2, WAITING)], None),
        ([at(0, BACKWARD), at(1, WAITING), at(2, CLOSED)], None),
        ([at(0, BACKWARD), at(1, WAITING)], None),  # no observation of rank 2
        ([at(0, BACKWARD), at(1, BACKWARD), at(2, BACKWARD)], None),
    ],
)
def test_ranks_wait_for_each_other_at_two_places(sightings, blamed):
    """Detect ranks that wait for each other in different collectives."""
    blame = apart(sightings, 3)
    assert (blame and (blame.ranks, blame.error("").code)) == (blamed and (blamed, "HT661"))


def test_message_of_many_ranks_is_short():
    """Name 1000 stopped ranks in one short message."""
    sightings = [at(rank, BACKWARD, "T", host=f"node{rank}") for rank in range(1000)]
    blame = judge(sightings, 1001, ())
    assert len(blame.ranks) == 1000
    found = blame.error("").found
    assert found.startswith("ranks 0-999 on node0, node1, ")
    assert len(found) < 500


def test_job_is_suspended_where_every_rank_is_stopped():
    """Detect a suspended job: every rank is stopped."""
    assert suspended([at(0, BACKWARD, "T"), at(1, LOADING, "T")], 2)
    assert not suspended([at(0, BACKWARD, "T"), at(1, LOADING, "T")], 3)
    assert not suspended([at(0, BACKWARD, "T"), at(1, LOADING)], 2)


def test_helpers_exchange_observations_and_agree_on_one_result(tmp_path):
    """Exchange observations between the helpers of two hosts; both use the same result."""
    first, second = (HelperExchange(tmp_path, "start", host, 0) for host in ("node1", "node2"))
    first.post([at(0, BACKWARD)])
    second.post([at(1, LOADING)])
    assert (first.others(), second.others()) == ([at(1, LOADING)], [at(0, BACKWARD)])
    first.withdraw()
    assert second.others() == []
    assert not first.judged()
    assert first.settle("first") == second.settle("second") == "first"
    assert second.judged()
    HelperExchange(tmp_path, "next start", "node1", 0).clear()
    assert list(tmp_path.iterdir()) == []


def test_helper_does_not_wait_for_a_call_that_hangs():
    """Call a function that blocks; the helper continues after a time-out."""
    aside, free = Aside(0.1), threading.Event()
    until(lambda: aside(lambda: "answer") == "answer")
    assert aside(lambda: Path("nowhere").read_text()) is None
    assert aside(free.wait) is None
    assert aside(lambda: "answer") is None  # the previous call still hangs
    free.set()
    until(lambda: aside(lambda: "answer") == "answer")


def test_collectives_of_nccl_are_dumped_when_asked_and_named(tmp_path):
    """Ask for a dump, in the place of torch's thread; name the file, and that of no other rank."""
    environment = Environment(os.environ)
    recorder = FlightRecorder(environment, 2)
    folder = Path(recorder._folder)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert recorder.dump_to(tmp_path) is None  # torch has not begun
    os.mkfifo(f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}2.pipe")
    reader = os.open(folder / "rank-2.pipe", os.O_RDONLY | os.O_NONBLOCK)
    dump = recorder.dump_to(tmp_path)
    assert not folder.exists()

    def torch_thread():
        until(lambda: select.select([reader], [], [], 0)[0] and os.read(reader, 9))
        Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}2").write_text("collectives")

    thread = threading.Thread(target=torch_thread)
    thread.start()
    ranks = [
        WatchedRank(
            shared_memory.Facts(rank, os.getpid(), 0, None, *more), "node1", 0, 0, Limits(9, 9)
        )
        for rank, more in ((1, ()), (2, dump), (3, (str(tmp_path / "gone"), "nowhere")))
    ]
    assert dump_collectives(ranks) == [str(tmp_path / "nccl-rank-2")]
    thread.join(SECONDS)
    recorder.close()
    environment.put_back()
    os.close(reader)
    assert not [name for name in os.environ if name.startswith("TORCH_NCCL_D")]


def test_watchdog_imports_no_torch():
    """Import the helper in a new interpreter; torch is not imported."""
    code = "import sys, hpctrain.monitoring.watchdog.loop; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)
