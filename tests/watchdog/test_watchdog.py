"""A hang ends, with a name and stacks; nothing that lives is ended; nothing is left behind."""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain import rundir
from hpctrain.rundir import RunDirectory
from hpctrain.watchdog import PHASES, Watchdog, slots
from hpctrain.watchdog.blame import Sighting, judge, suspended
from hpctrain.watchdog.board import Aside, Board
from hpctrain.watchdog.phases import (
    BACKWARD,
    CLOSED,
    COMPUTING,
    EVALUATING,
    IDLE,
    LOADING,
    SAVING,
)
from hpctrain.world import World

SECONDS = 60  # a protection: what is tested takes two or three

# A rank without torch. It begins its third step when all are there, and then does what it is told.
RANK = """
import ctypes, json, os, signal, sys, threading, time
from pathlib import Path
from hpctrain.rundir import RunDirectory
from hpctrain.watchdog import BACKWARD, COMPUTING, IDLE, LOADING, Watchdog
from hpctrain.world import World

place, how, present, timeout, key = json.loads(sys.argv[1])
world = World(**place)
verdict = "verdict" if world.rank == 0 else None
watchdog = Watchdog(world, timeout, RunDirectory("run"), key, verdict)
watchdog.step = 3

def wait_for_the_others():
    watchdog.beat(BACKWARD)
    threading.Event().wait()

def hold_the_gil():
    while True:  # the signal that asks for the stack ends a sleep
        ctypes.PyDLL(None).sleep(1000)

def turn_in_circles():
    while True:
        pass

def load():
    watchdog.beat(LOADING)
    threading.Event().wait()

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()  # it goes on for a moment, to show its stack

def stop_in_the_sums():
    watchdog.beat(BACKWARD)
    stop()

def die():
    os._exit(9)

def leave():
    watchdog.close()
    os._exit(0)

def rest():
    watchdog.beat(IDLE)
    time.sleep(3 * timeout)

def work():
    for step in range(3, 30):
        watchdog.step = step
        watchdog.beat(COMPUTING)
        time.sleep(timeout / 10)

def work_on():
    while not Path("enough").exists():
        watchdog.beat(COMPUTING)
        time.sleep(0.01)

Path(f"ready-{world.rank}").touch()
while not all(Path(f"ready-{rank}").exists() for rank in present):
    time.sleep(0.01)
watchdog.beat(COMPUTING)
globals()[how]()
watchdog.close()
"""


class Start:
    """Ranks of one start, and what can be seen of them."""

    def __init__(self, folder, how, layout, timeout, absent=(), stderr=None):
        self.folder, self.layout = folder, layout
        self.key = secrets.token_hex(8)
        self.directory = RunDirectory(folder / "run")
        self.directory.path.mkdir(exist_ok=True)
        self.ranks = {}
        hosts = tuple(f"node{n + 1}" for n in range(len(layout)))
        places = [(node, local) for node, tasks in enumerate(layout) for local in range(tasks)]
        present = [rank for rank in range(len(places)) if rank not in absent]
        self.said = folder / "said"
        with self.said.open("ab") as said:
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
                told = json.dumps([place, how[rank], present, timeout, self.key])
                self.ranks[rank] = subprocess.Popen(
                    [sys.executable, "-c", RANK, told], cwd=folder, stderr=stderr or said
                )

    def shared(self):
        return [
            base / slots.name(self.key, node)
            for node in range(len(self.layout))
            for base in slots._bases()
        ]

    def helpers(self):
        """The ids of the helpers."""
        names = {os.fsencode(folder) for folder in self.shared()}
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"watchdog/helper.py") for word in words) and names & set(words):
                found.append(int(path.parent.name))
        return found

    def in_the_loop(self):
        """Wait until all ranks and helpers are at work."""
        until(lambda: all((self.folder / f"ready-{rank}").exists() for rank in self.ranks))
        logs = [self.directory.logs / f"watch-node{n + 1}.log" for n in range(len(self.layout))]
        until(lambda: all(log.exists() for log in logs))

    def end(self):
        """Their exit codes, when all is over and nothing is left."""
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
        code, reason = rundir.read_verdict(self.folder / "verdict")
        assert code == rundir.FAILED
        return reason


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path):
    started = []

    def launch(*how, layout=None, timeout=1.0, **more):
        started.append(Start(tmp_path, how, layout or (len(how),), timeout, **more))
        return started[-1]

    yield launch
    for one in started:
        for process in one.ranks.values():
            process.kill()
            process.wait()


WAIT = "wait_for_the_others"


@pytest.mark.parametrize(
    ("how", "found", "shown"),
    [
        ("stop", "at step 3, in the script's code: process {} is stopped (state T)", "in stop"),
        (
            "stop_in_the_sums",
            "at step 3, in the backward pass or its sums: process {} is stopped (state T)",
            "in stop_in_the_sums",
        ),
        ("hold_the_gil", "at step 3, in the script's code", "in hold_the_gil"),
        ("turn_in_circles", "at step 3, in the script's code", "in turn_in_circles"),
        ("load", "at step 3, waits for data", "in load"),
    ],
)
def test_a_rank_that_hangs_is_named_and_every_stack_is_shown(start, how, found, shown):
    ranks = start(WAIT, WAIT, how)
    assert ranks.end() == [-signal.SIGKILL] * 3
    reason = ranks.reason()
    seconds = next(text for text in ("1 s", "2 s", "3 s") if text in reason)
    pid = ranks.ranks[2].pid
    assert reason == f"rank 2 on node1 is silent for {seconds} {found.format(pid)}"
    said = ranks.said.read_text()
    assert said.startswith(f"hpctrain: error: {reason}\n  expected: ")
    assert "  to mend:  " in said
    for text in (ranks.log(), said):
        assert f"hpctrain: error: {reason}\n" in text
        assert [text.count(f"\nrank {rank}: silent for") for rank in range(3)] == [1, 1, 1]
        assert text.count("in wait_for_the_others") == 2
        assert text.count(f"{shown}\n") == 1
    assert not list(ranks.directory.path.glob(".*"))


def test_a_rank_that_is_dead_is_named(start):
    ranks = start(WAIT, "die", WAIT)
    assert sorted(ranks.end()) == [-signal.SIGKILL, -signal.SIGKILL, 9]
    assert ranks.reason().startswith(
        "rank 1 on node1 is gone, last seen at step 3, in the script's code; the others are silent"
    )
    assert f"rank 1 is gone, process {ranks.ranks[1].pid}" in ranks.log()


def test_a_rank_that_has_left_is_named(start):
    ranks = start(WAIT, "leave", WAIT)
    assert sorted(ranks.end()) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    reason = ranks.reason()
    assert reason.startswith("ranks 0 and 2 on node1 are silent for")
    assert reason.endswith("they wait, and rank 1 on node1 is no longer in the run")


def test_where_all_wait_nobody_is_named(start):
    ranks = start(WAIT, WAIT, WAIT)
    assert ranks.end() == [-signal.SIGKILL] * 3
    assert ranks.reason().startswith("all 3 ranks are silent for")
    assert ranks.reason().endswith("their sums: they wait for each other".replace("their", "its"))


def test_a_single_process_hangs_as_well(start):
    ranks = start("turn_in_circles")
    assert ranks.end() == [-signal.SIGKILL]
    assert ranks.reason().startswith("rank 0 on node1 is silent for")


@pytest.mark.parametrize("how", ["turn_in_circles", "stop"])
def test_the_helpers_of_several_hosts_name_the_same_rank(start, how):
    ranks = start(WAIT, WAIT, WAIT, how, layout=(2, 1, 1), timeout=1.5)
    assert ranks.end() == [-signal.SIGKILL] * 4
    reason = ranks.reason()
    assert reason.startswith("rank 3 on node3 is silent for")
    for host in ("node1", "node2", "node3"):
        assert f"hpctrain: error: {reason}\n" in ranks.log(host)
    assert "in wait_for_the_others" in ranks.log("node2")
    assert f"in {how}\n" in ranks.log("node3")
    assert "node3: rank 3: silent for" in ranks.log("node1")
    # What the helpers told each other goes with the next start.
    assert len(list(ranks.directory.path.glob(".hang-*"))) == 1
    again = start("work_on", layout=(1,))
    again.in_the_loop()
    until(lambda: not list(again.directory.path.glob(".hang-*")))
    (again.folder / "enough").touch()
    assert again.end() == [0]


def test_a_host_of_which_nothing_is_heard_is_named(start):
    ranks = start(WAIT, WAIT, WAIT, layout=(2, 1), absent=(2,))
    assert ranks.end() == [-signal.SIGKILL] * 2
    assert "nothing is heard of rank 2 (node2)" in ranks.reason()


@pytest.mark.parametrize("how", ["rest", "work", "work_on"])
def test_ranks_that_live_go_on(start, how):
    ranks = start(how, how, "work", timeout=0.5)
    (ranks.folder / "enough").touch()
    assert ranks.end() == [0, 0, 0]
    assert "error" not in ranks.log()
    assert ranks.said.read_text() == ""
    assert not (ranks.folder / "verdict").exists()


@pytest.mark.parametrize(
    ("layout", "helper_too"), [((2,), True), ((2,), False), ((1, 1), True), ((1, 1), False)]
)
def test_a_job_that_was_suspended_goes_on(start, layout, helper_too):
    ranks = start("work_on", "work_on", timeout=0.5, layout=layout)
    ranks.in_the_loop()
    pids = [process.pid for process in ranks.ranks.values()]
    pids += ranks.helpers() if helper_too else []
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)  # three times the time-out
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    (ranks.folder / "enough").touch()
    assert ranks.end() == [0, 0]
    assert ranks.said.read_text() == ""


@pytest.mark.parametrize("helper_too", [True, False])
def test_nothing_is_left_of_ranks_that_were_killed(start, helper_too):
    ranks = start("work_on", "work_on")
    ranks.in_the_loop()
    until(lambda: not any(folder.exists() for folder in ranks.shared()))
    helpers = ranks.helpers()
    assert len(helpers) == 1
    for helper in helpers if helper_too else ():
        os.kill(helper, signal.SIGKILL)
    for process in ranks.ranks.values():
        process.kill()
    began = time.monotonic()
    assert ranks.end() == [-signal.SIGKILL] * 2
    assert time.monotonic() - began < 5
    assert not (ranks.folder / "verdict").exists()


def test_the_helper_survives_what_is_sent_to_the_whole_step(start):
    ranks = start(WAIT, "turn_in_circles")
    until(ranks.helpers)
    (helper,) = ranks.helpers()
    for number in ("TERM", "INT", "HUP", "QUIT", "TTOU", "USR1", "USR2", "ALRM", "XCPU"):
        os.kill(helper, getattr(signal, f"SIG{number}"))
    assert ranks.end() == [-signal.SIGKILL] * 2
    assert ranks.reason().startswith("rank 1 on node1")


def test_the_helper_has_its_share_of_the_processors_with_the_ranks(start):
    """Linux's autogroup gives it by session; Ctrl-C goes to a process group."""
    ranks = start("work_on", "work_on")
    until(ranks.helpers)
    (helper,) = ranks.helpers()
    ours = [process.pid for process in ranks.ranks.values()]
    assert os.getsid(helper) in map(os.getsid, ours)
    assert os.getpgid(helper) not in map(os.getpgid, ours)


def test_the_run_goes_on_without_its_helper(start):
    ranks = start("work_on", "work_on", timeout=0.3)
    ranks.in_the_loop()
    until(lambda: not any(folder.exists() for folder in ranks.shared()))
    for helper in ranks.helpers():
        os.kill(helper, signal.SIGKILL)
    (ranks.folder / "enough").touch()
    assert ranks.end() == [0, 0]


def test_a_file_system_that_hangs_stops_no_helper(start, tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "watch-node1.log")  # nobody reads, so who writes waits for ever
    ranks = start(WAIT, "turn_in_circles")
    assert ranks.end() == [-signal.SIGKILL] * 2
    assert "hpctrain: error: rank 1 on node1 is silent" in ranks.said.read_text()


def fill(pipe):
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 16))


def test_a_launcher_that_does_not_read_stops_no_helper(start):
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        fill(writer)
        os.set_blocking(writer, True)
        ranks = start(WAIT, "turn_in_circles", stderr=writer)
        assert ranks.end() == [-signal.SIGKILL] * 2
    finally:
        os.close(reader)
        os.close(writer)
    assert ranks.reason().startswith("rank 1 on node1")


def alone(tmp_path, timeout=1800.0):
    world = World(0, 1, 0, 1, 0, 1, ("node1",))
    return Watchdog(world, timeout, RunDirectory(tmp_path / "run"), secrets.token_hex(8), None)


def test_closing_waits_for_the_helper_and_leaves_nothing(tmp_path):
    before = set(slots._bases()[0].glob("hpctrain-watch-*"))
    for _ in range(3):
        watchdog = alone(tmp_path)
        watchdog.beat(COMPUTING)
        watchdog.close()
        watchdog.close()
        watchdog.beat(COMPUTING)  # to nobody
    assert set(slots._bases()[0].glob("hpctrain-watch-*")) <= before


def facts(rank):
    return slots.Facts(rank, os.getpid(), 0, None)


def test_another_place_is_taken_where_dev_shm_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "_bases", lambda: [tmp_path / "nowhere", tmp_path])
    first, second = (slots.take("start", facts(rank), {"a": 1}) for rank in (0, 1))
    assert (first[1], second[1]) == (True, False)
    folder = tmp_path / "start"
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in slots.paths(folder)] == ["rank-0", "rank-1"]
    assert slots.read_settings(folder) == {"a": 1}
    for slot, _ in (first, second):
        slot.leave()
        slot.close()
    assert list(tmp_path.iterdir()) == [folder]


def test_without_any_place_the_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(slots, "_bases", lambda: [tmp_path / "nowhere"])
    monkeypatch.setattr("hpctrain.watchdog.rank.logger.propagate", True)
    watchdog = alone(tmp_path)
    assert "no watch for hangs on node1" in caplog.text
    watchdog.beat(COMPUTING)
    watchdog.close()


def test_a_folder_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "_bases", lambda: [tmp_path])
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        slots.take("open", facts(0), {})


def test_what_dead_starts_have_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "_bases", lambda: [tmp_path])
    dead, held, fresh = (tmp_path / slots.name(key, 0) for key in ("dead", "held", "fresh"))
    for folder in (dead, held, fresh):
        folder.mkdir()
        (folder / "rank-0").touch()
    with (held / "rank-0").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        for folder in (dead, held):
            os.utime(folder, (0, 0))
        slots.remove_stale()
    assert [folder.exists() for folder in (dead, held, fresh)] == [False, True, True]


def at(rank, phase, state="S", step=3, host="node1"):
    return Sighting(rank, host, step, phase, 60.0, 100 + rank, state, "rpc_wait")


@pytest.mark.parametrize(
    ("seen", "ranks", "words"),
    [
        ([at(0, BACKWARD), at(1, BACKWARD), at(2, COMPUTING)], (2,), "in the script's code"),
        ([at(0, COMPUTING), at(1, COMPUTING, step=2), at(2, BACKWARD)], (1,), "step 2"),
        ([at(0, BACKWARD), at(1, BACKWARD, "T"), at(2, LOADING)], (1,), "(state T)"),
        ([at(0, BACKWARD), at(1, BACKWARD, "t"), at(2, BACKWARD)], (1,), "held by a debugger"),
        ([at(0, BACKWARD, "T"), at(1, COMPUTING, ""), at(2, LOADING)], (1,), "is gone"),
        ([at(0, EVALUATING), at(1, IDLE), at(2, EVALUATING)], (1,), "outside of the run's loop"),
        ([at(0, SAVING, "D"), at(1, SAVING), at(2, SAVING)], (0,), "in rpc_wait (state D)"),
        ([at(0, LOADING, "D"), at(1, LOADING, "D"), at(2, LOADING)], (0, 1), "ranks 0 and 1"),
        ([at(0, LOADING), at(1, LOADING), at(2, LOADING)], (), "all 3 ranks are silent for 60 s"),
        ([at(0, BACKWARD), at(1, CLOSED, ""), at(2, BACKWARD)], (1,), "no longer in the run"),
        ([at(0, SAVING), at(1, CLOSED), at(2, COMPUTING)], (2,), "rank 2"),
        ([at(0, LOADING), at(1, CLOSED), at(2, CLOSED, "")], (0,), "rank 0 on node1 is silent"),
        ([at(0, BACKWARD), at(1, BACKWARD)], (2,), "nothing is heard of rank 2 (node2)"),
        ([at(0, COMPUTING), at(1, BACKWARD)], (0,), "nothing is heard of rank 2 (node2)"),
        ([at(0, LOADING), at(1, LOADING)], (0, 1), "nothing is heard of rank 2 (node2)"),
    ],
)
def test_who_is_to_blame(seen, ranks, words):
    blame = judge(seen, 3, ("node1", "node2") if len(seen) < 3 else ("node1",))
    assert blame.ranks == ranks
    assert words in blame.found
    assert "\n" not in blame.found + blame.fix


def test_many_ranks_make_no_long_line():
    seen = [at(rank, BACKWARD, "T", host=f"node{rank}") for rank in range(1000)]
    blame = judge(seen, 1001, ())
    assert len(blame.ranks) == 1000
    assert "and 993 more" in blame.found
    assert len(blame.found) < 500


def test_a_run_is_suspended_where_every_rank_is_stopped():
    assert suspended([at(0, BACKWARD, "T"), at(1, LOADING, "T")], 2)
    assert not suspended([at(0, BACKWARD, "T"), at(1, LOADING, "T")], 3)
    assert not suspended([at(0, BACKWARD, "T"), at(1, LOADING)], 2)


def test_every_phase_has_words_and_the_order_is_that_of_a_step():
    assert list(PHASES) == sorted(PHASES)
    assert all(phase.words for phase in PHASES.values())


def test_helpers_tell_each_other_and_agree(tmp_path):
    one, other = (Board(tmp_path, "start", host, 0) for host in ("node1", "node2"))
    one.post([at(0, BACKWARD)])
    other.post([at(1, LOADING)])
    assert (one.others(), other.others()) == ([at(1, LOADING)], [at(0, BACKWARD)])
    one.withdraw()
    assert other.others() == []
    assert not one.judged()
    assert one.settle("first") == other.settle("second") == "first"
    assert other.judged()
    Board(tmp_path, "next start", "node1", 0).clear()
    assert list(tmp_path.iterdir()) == []


def test_what_hangs_is_left_aside():
    aside, free = Aside(), threading.Event()
    assert aside(lambda: "answer", 5) == "answer"
    assert aside(lambda: Path("nowhere").read_text(), 5) is None
    assert aside(free.wait, 0.01) is None
    assert aside(lambda: "answer", 0.01) is None  # the one before still hangs
    free.set()
    until(lambda: aside(lambda: "answer", 5) == "answer")


def test_it_needs_no_torch():
    code = (
        "import sys, hpctrain.watchdog, hpctrain.watchdog.watch; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)
