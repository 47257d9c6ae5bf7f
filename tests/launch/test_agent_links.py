"""Connections of agents: who is let in, and what is believed."""

import json
import queue
import socket
import threading

import pytest

from hpctrain.errors import StartError
from hpctrain.launch import agent_links
from hpctrain.launch.agent_links import AgentLinks, connect

LAUNCH, SECRET = "a-launch", "a-secret"


@pytest.fixture
def server():
    """Return the supervisor's side, and the queue of what it has received."""
    received = queue.SimpleQueue()
    links = AgentLinks(LAUNCH, SECRET, "127.0.0.1", received.put)
    yield links, received
    links.close()


def join(links, secret=SECRET, launch=LAUNCH, seconds=0.0):
    return connect(links.places, launch, secret, lambda address: {"from": address}, seconds)


def test_messages_arrive_in_order_and_an_end_is_noticed(server):
    links, received = server
    agent = join(links)
    link, hello = received.get(timeout=10)
    assert hello == {"from": "127.0.0.1"}
    for number in range(100):
        agent.send(number=number)
        link.send(number=-number)
    assert [received.get(timeout=10)[1] for _ in range(100)] == [{"number": n} for n in range(100)]
    assert [agent.receive() for _ in range(100)] == [{"number": -n} for n in range(100)]
    agent.end()
    assert received.get(timeout=10) == (link, None)


def test_agent_notices_the_end_of_the_supervisor(server):
    links, received = server
    agent = join(links)
    received.get(timeout=10)
    links.close()
    assert agent.receive() is None


@pytest.mark.parametrize("wrong", [{"secret": "another"}, {"secret": ""}, {"launch": "another"}])
def test_agent_without_the_secret_of_the_launch_is_not_let_in(server, wrong):
    links, received = server
    with pytest.raises(StartError) as caught:
        join(links, **wrong)
    assert caught.value.code == "HT202"
    assert "127.0.0.1: another program answers" in str(caught.value)
    join(links)
    assert received.get(timeout=10)[1] == {"from": "127.0.0.1"}  # the first one


def test_agent_does_not_believe_a_program_at_the_place_of_the_supervisor():
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = [("127.0.0.1", other.getsockname()[1])]
        accepted = queue.SimpleQueue()

        def answer():
            peer, _ = other.accept()
            peer.recv(1000)
            peer.sendall(json.dumps({"proof": "x", "challenge": "y"}).encode() + b"\n")
            accepted.put(peer.recv(1000))
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StartError, match="another program answers"):
            connect(place, LAUNCH, SECRET, lambda _: {"secret": "facts"}, 0.0)
        thread.join()
        assert accepted.get() == b""  # it was told nothing


@pytest.mark.parametrize("change", ["repeated", "changed", "invented"])
def test_message_that_was_changed_or_repeated_ends_the_connection(server, change):
    links, received = server
    agent = join(links)
    link, _ = received.get(timeout=10)
    sent = []
    raw = agent.connection
    agent.connection = Recorder(raw, sent)
    agent.send(ended=1)
    assert received.get(timeout=10)[1] == {"ended": 1}
    line = sent[0]
    if change == "changed":
        agent._sent += 1
        line = line.replace(b"1", b"2", 1)
    elif change == "invented":
        line = json.dumps({"proof": "0" * 64, "text": '{"ended": 2}'}).encode() + b"\n"
    raw.sendall(line)
    assert received.get(timeout=10) == (link, None)


class Recorder:
    """A socket that records what is sent."""

    def __init__(self, connection, sent):
        self.connection, self.sent = connection, sent

    def settimeout(self, seconds):
        self.connection.settimeout(seconds)

    def sendall(self, data):
        self.sent.append(data)
        self.connection.sendall(data)


def test_silent_peers_hold_no_agent_back(server, monkeypatch):
    monkeypatch.setattr(agent_links, "_MOST_UNKNOWN", 4)
    links, received = server
    peers = [socket.create_connection(links.places[0]) for _ in range(8)]
    agent = join(links)
    assert received.get(timeout=10)[1] == {"from": "127.0.0.1"}
    agent.end()
    for peer in peers:
        peer.close()
