"""Lost hosts as the agents see them: three agents in this process, on loopback.

tests/training/test_resume_on_slurm.py crashes hosts, powers them off and cuts their network.
"""

import socket
import time

import pytest

from hpctrain.cluster.world import World
from hpctrain.launch import host_watch
from hpctrain.launch.host_watch import HostWatch
from hpctrain.rendezvous import Rendezvous, Roster

HOSTS = ("maple", "oak", "ash")


def watch(rank, listener, losses):
    """Return the watch of an agent; those of the first one accept by the listener."""
    roster = Roster((), ("127.0.0.1",) * 3, HOSTS, (0, 1, 2), listener.getsockname()[1])
    world = World(rank, 3, 0, 1, rank, 3, HOSTS)
    met = Rendezvous(world, roster, None, None, "the-nonce", None if rank else listener)
    return HostWatch(met, "a-secret", lambda: losses.append(rank))


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def agents(monkeypatch, listener):
    """Return the watches of three agents, the first one first, and the losses that they saw."""
    monkeypatch.setattr(host_watch, "_SECONDS_TO_EXPLAIN", 0.2)
    losses = []
    watches = [watch(rank, listener, losses) for rank in range(3)]
    yield watches, losses
    for one in watches:
        vanish(one)


def look(watches, condition=lambda: False, seconds=1.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        for watch in watches:
            watch.look()
        time.sleep(0.01)


def vanish(watch):
    """End the connections of an agent as the kernel does for a killed process."""
    for link in watch._links:
        link.end()
    if watch._server is not None:
        watch._server.close()


def test_hosts_that_end_one_after_the_other_are_not_lost(agents):
    watches, losses = agents
    look(watches, seconds=0.1)
    watches[2].close()
    look(watches[:2], seconds=0.4)
    watches[0].close()
    look([watches[1]], seconds=0.4)
    watches[1].close()
    assert not losses
    assert not any(watch.lost for watch in watches)


def test_all_agents_know_the_lost_host(agents):
    watches, losses = agents
    look(watches, seconds=0.1)
    vanish(watches[2])
    look(watches[:2], lambda: len(losses) == 2)
    assert [watch.lost for watch in watches[:2]] == ["ash", "ash"]
    look(watches[:2], seconds=0.1)
    assert losses == [0, 1]  # once on each


def test_agent_that_never_connects_is_lost(listener, monkeypatch):
    """Its host was lost while its ranks waited."""
    monkeypatch.setattr(host_watch, "_SECONDS_TO_EXPLAIN", 0.2)
    monkeypatch.setattr(host_watch, "_SECONDS_TO_CONNECT", 0.2)
    losses = []
    watches = [watch(rank, listener, losses) for rank in range(2)]
    look(watches, lambda: len(losses) == 2)
    assert [one.lost for one in watches] == ["ash", "ash"]
    for one in watches:
        vanish(one)


def test_lost_first_host(agents):
    watches, losses = agents
    look(watches, seconds=0.1)
    vanish(watches[0])
    look(watches[1:], lambda: len(losses) == 2)
    assert [watch.lost for watch in watches[1:]] == ["maple", "maple"]


def test_agent_that_ends_finds_out_why_another_one_is_gone(agents):
    watches, losses = agents
    look(watches, seconds=0.1)
    vanish(watches[1])
    watches[0].close()  # its ranks have ended, as they have lost those of oak
    assert watches[0].lost == "oak"
    look([watches[2]], lambda: bool(watches[2].lost))
    assert losses == [0, 2]


@pytest.mark.parametrize("said", [b"", b"x" * 5000, b"lost 1\n", b"bye\n", b"wrong 1\n", b"\xff\n"])
def test_unknown_programs_change_nothing(agents, said):
    watches, losses = agents
    with socket.create_connection(("127.0.0.1", watches[1]._met.roster.port)) as unknown:
        unknown.sendall(said)
        look(watches, seconds=0.1)
    look(watches, seconds=0.4)
    assert not losses
    assert len(watches[0]._links) == 2
