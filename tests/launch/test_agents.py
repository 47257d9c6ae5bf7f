"""Agents of a job on hosts that this machine simulates: real processes, real connections."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import time
from pathlib import Path

import agents
import processes
import pytest
from launches import PYTHON
from processes import until

from hpctrain.launch.agent_links import AgentLinks
from hpctrain.launch.plan import Plan

# Each rank prints its attempt and its launcher's store, and waits for a file. The first attempt's
# rank 1 can be told to die.
PROGRAM = """
import os, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("begins", attempt, os.environ["RANK"], os.getpid(), os.environ["MASTER_PORT"], flush=True)
while not os.path.exists(f"end-{attempt}"):
    time.sleep(0.01)
"""
AGENT = "hpctrain.launch.agent"


@pytest.fixture
def begin(tmp_path):
    """Return a function that starts a launch, and the lines of its output so far."""
    Path("train.py").write_text(PROGRAM)
    with processes.background() as begin:

        def start(hosts=3, nproc=1, program=("train.py",), plain="1"):
            command = [PYTHON, agents.__file__, str(hosts), str(nproc), "run", PYTHON, *program]
            process = begin(command, PLAIN=plain)
            lines = []
            os.set_blocking(process.stdout.fileno(), False)

            def read():
                with contextlib.suppress(TypeError, ValueError):  # nothing new, or closed
                    lines.extend((process.stdout.read() or "").splitlines())
                return lines

            return process, read

        yield start


def begun(lines, attempt):
    """Return the process ids of the ranks of an attempt, by rank, and the ports they got."""
    words = [line.split()[-5:] for line in lines if f"begins {attempt} " in line]
    return {int(rank): int(pid) for _, _, rank, pid, _ in words}, {word[4] for word in words}


def run_is_up(read, ranks, attempt=0):
    until(lambda: len(begun(read(), attempt)[0]) == ranks)
    return begun(read(), attempt)


def own_agents():
    here = processes.started_here(AGENT)
    lines = processes.lines(AGENT).items()
    return {pid for pid, line in lines if pid in here and line.rstrip().endswith(f" -m {AGENT}")}


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_agents_live_on_after_a_killed_rank_and_serve_new_stores(begin):
    process, read = begin(nproc=2)
    first, ports = run_is_up(read, 6)
    before = own_agents()
    assert len(before) == 3
    os.kill(first[1], signal.SIGKILL)
    second, new_ports = run_is_up(read, 6, attempt=1)
    assert own_agents() == before
    assert not alive(first.values())
    assert (len(ports), len(new_ports)) == (1, 1)
    assert ports.isdisjoint(new_ports)
    Path("end-1").touch()
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert (process.returncode, "".join(out.splitlines()[-1:])) == (
        0,
        "ended 0: ; steps [['node1', 'node2', 'node3']]",
    )
    assert "rank 1 on node1 failed first, with signal SIGKILL" in err
    assert "attempt 2: 3 of 3 hosts" in err
    assert not alive(second.values())
    until(lambda: not own_agents())
    assert not list(Path("run").glob(".*"))


def test_killed_agent_is_replaced_on_its_host_alone(begin):
    process, read = begin()
    first, _ = run_is_up(read, 3)
    before = own_agents()
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    run_is_up(read, 3, attempt=1)
    assert not alive(first.values())
    assert len(own_agents() & before) == 2
    Path("end-1").touch()
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0
    assert re.search(r"steps \[\['node1', 'node2', 'node3'\], \['node\d'\]\]", out)
    assert re.search(r"node\d was lost: the connection to its agent has ended", err)


def test_ranks_and_agents_end_with_a_killed_supervisor(begin):
    process, read = begin(nproc=2)
    first, _ = run_is_up(read, 6)
    process.kill()
    killed = time.monotonic()
    until(lambda: not alive(first.values()))
    assert time.monotonic() - killed < 2
    until(lambda: not own_agents())


def test_ranks_and_agent_end_with_their_link_although_the_supervisor_lives():
    """So it is on another host, whose kernel ends the link, and where no parent ends."""
    received = queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))
    links = AgentLinks("launch", "secret", listener, received.put)
    where = {"places": [listener.getsockname()], "launch": "launch", "step": 0, "alone": True}
    variables = {"HPCTRAIN_AGENT": json.dumps(where), "HPCTRAIN_SECRET": "secret"}
    with processes.background() as begin:
        stop = str(Path("launch", "stop").absolute())
        agent = begin([PYTHON, "-m", AGENT], HPCTRAIN_STOP_FILE=stop, **variables)
        link, hello = received.get(timeout=processes.PATIENCE)
        plan = Plan(
            ["sh", "-c", "echo $$ >rank; exec sleep 1000"],
            "",
            hosts=["node1"],
            counts=[1],
            main_address="127.0.0.1",
            own_address="127.0.0.1",
            ports=hello["facts"]["ports"],
        )
        link.send(run=[plan.of_all_hosts(), 0, "127.0.0.1"])
        until(lambda: Path("rank").exists() and Path("rank").read_text())
        links.close()
        ended = time.monotonic()
        until(lambda: not alive([int(Path("rank").read_text())]))
        assert time.monotonic() - ended < 2
        assert agent.wait(processes.PATIENCE) == 1


def test_suspended_supervisor_is_no_loss(begin):
    process, read = begin()
    first, _ = run_is_up(read, 3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(11)  # longer than a lost host is waited for
    process.send_signal(signal.SIGCONT)
    assert len(alive(first.values())) == 3
    Path("end-0").touch()
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0, err


def test_signal_without_a_session_ends_ranks_and_a_stuck_one_by_a_second_signal(begin):
    Path("train.py").write_text("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + PROGRAM)
    process, read = begin()
    first, _ = run_is_up(read, 3)
    process.send_signal(signal.SIGTERM)
    until(lambda: "ends the ranks, which have no Session" in process.stderr.readline())
    time.sleep(0.6)  # a signal that comes at once counts as the same one
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 75
    assert not alive(first.values())


def test_secret_is_in_no_command_line_and_not_where_agents_connect(begin):
    _, read = begin()
    first, _ = run_is_up(read, 3)
    environ = Path(f"/proc/{first[0]}/environ").read_bytes().decode().split("\0")
    secret = dict(line.partition("=")[::2] for line in environ if line)["HPCTRAIN_SECRET"]
    assert not processes.having(secret)
    where = [
        line
        for pid in own_agents()
        for line in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        if line.startswith("HPCTRAIN_AGENT=")
    ]
    assert len(where) == 3
    assert all(secret not in line for line in where)


@pytest.mark.parametrize("hosts", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_launch_creates_one_file_on_the_shared_file_system_for_any_number_of_hosts(begin, hosts):
    process, read = begin(hosts)
    run_is_up(read, hosts)
    (folder,) = Path("run").glob(".launch-*")
    assert [str(path.relative_to(folder)) for path in folder.rglob("*")] == ["agents-0"]
    Path("end-0").touch()
    process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0
    assert not folder.exists()


WARM = """
import json, os, hpctrain, torch
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
server = os.getppid()
forked = "libtorch" in open(f"/proc/{server}/maps").read()
print(json.dumps([os.environ["RANK"], server, forked]), flush=True)
with hpctrain.Session(batch_size=1) as session:
    if attempt == "0":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.ranks
def test_single_rank_of_a_host_is_forked_from_the_same_warm_process_after_a_failure(begin):
    Path("train.py").write_text(WARM)
    process, read = begin(2, plain="")
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0, err
    lines = [line for line in [*read(), *out.splitlines()] if ': ["' in line]
    found = sorted(json.loads(line.partition(": ")[2]) for line in lines)
    assert [(rank, forked) for rank, _, forked in found] == [
        ("0", True),
        ("0", True),
        ("1", True),
        ("1", True),
    ]
    assert found[0][1] == found[1][1]
    assert found[2][1] == found[3][1]
