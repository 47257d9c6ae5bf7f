"""Connections of agents: who is let in, and what is believed."""

import json
import queue
import socket
import threading

import pytest

from hpctrain.errors import StartError
from hpctrain.launch import agent_links
from hpctrain.launch.agent_links import AgentLinks, connect
from hpctrain.rendezvous.messages import Credentials

LAUNCH, SECRET = "a-launch", "a-secret"


@pytest.fixture
def server():
    """Return the supervisor's side, and the queue of what it has received."""
    received = queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))
    links = AgentLinks(LAUNCH, SECRET, listener, received.put)
    links.place = listener.getsockname()
    yield links, received
    links.close()


class Agent:
    """The agent's side, and the queue of what it has received."""

    def __init__(self, links, secret=SECRET, launch=LAUNCH):
        hello = lambda address: {"from": address}  # noqa: E731
        self.link = connect([links.place], launch, secret, hello, 0.0)
        self.received = queue.SimpleQueue()
        self.link.follow(self.received.put)

    def receive(self):
        return self.received.get(timeout=10)[1]


join = Agent


def test_messages_arrive_in_order_and_an_end_is_noticed(server):
    links, received = server
    agent = join(links)
    link, hello = received.get(timeout=10)
    assert hello == {"from": "127.0.0.1"}
    for number in range(100):
        agent.link.send(number=number)
        link.send(number=-number)
    assert [received.get(timeout=10)[1] for _ in range(100)] == [{"number": n} for n in range(100)]
    assert [agent.receive() for _ in range(100)] == [{"number": -n} for n in range(100)]
    agent.link.end()
    assert received.get(timeout=10) == (link, None)


def test_agent_notices_the_end_of_the_supervisor(server):
    links, received = server
    agent = join(links)
    received.get(timeout=10)
    links.close()
    assert agent.receive() is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"secret": "another"}, "this start, with another HPCTRAIN_SECRET"),
        ({"secret": ""}, "this start, with another HPCTRAIN_SECRET"),
        ({"launch": "another"}, "Connection reset by peer"),
    ],
)
def test_agent_without_the_secret_of_the_launch_is_not_let_in(server, wrong, text):
    links, received = server
    with pytest.raises(StartError) as caught:
        join(links, **wrong)
    assert caught.value.code == "HT202"
    assert f"127.0.0.1: {text}" in str(caught.value)
    join(links)
    assert received.get(timeout=10)[1] == {"from": "127.0.0.1"}  # the first one


def test_peer_with_a_false_proof_is_not_let_in(server):
    """It has the name of the launch, which is no secret, and not the secret."""
    links, received = server
    with socket.create_connection(links.place, 10) as peer, peer.makefile("rb") as lines:
        start = Credentials(LAUNCH, "").start
        peer.sendall(json.dumps({"start": start, "challenge": "x"}).encode() + b"\n")
        assert json.loads(lines.readline())["proof"]
        peer.sendall(json.dumps({"proof": "0" * 64, "hello": "{}"}).encode() + b"\n")
        assert lines.readline() == b""
    assert received.empty()


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
        with pytest.raises(StartError, match="another program listens there"):
            connect(place, LAUNCH, SECRET, lambda _: {"secret": "facts"}, 0.0)
        thread.join()
        assert accepted.get() == b""  # it was told nothing


@pytest.mark.parametrize("change", ["repeated", "changed", "invented"])
def test_message_that_was_changed_or_repeated_ends_the_connection(server, change):
    links, received = server
    agent = join(links)
    link, _ = received.get(timeout=10)
    connection, sent = agent.link._connection, []
    send = connection.send
    agent.link._connection = Recorder(connection, sent)
    agent.link.send(ended=1)
    assert received.get(timeout=10)[1] == {"ended": 1}
    line = sent[0]
    if change == "changed":
        line = line.replace(b"1", b"2", 1)
    elif change == "invented":
        line = json.dumps({"proof": "0" * 64, "text": '{"ended": 2}'}).encode() + b"\n"
    agent.link._call(send, line)
    assert received.get(timeout=10) == (link, None)


class Recorder:
    """A connection that records what is sent."""

    def __init__(self, connection, sent):
        self.connection, self.sent = connection, sent
        self.challenges = connection.challenges

    def send(self, line):
        self.sent.append(line)
        self.connection.send(line)

    def __getattr__(self, name):
        return getattr(self.connection, name)


def test_silent_peers_hold_no_agent_back(server, monkeypatch):
    monkeypatch.setattr(agent_links, "_MOST_UNKNOWN", 4)
    links, received = server
    peers = [socket.create_connection(links.place) for _ in range(8)]
    agent = join(links)
    assert received.get(timeout=10)[1] == {"from": "127.0.0.1"}
    agent.link.end()
    for peer in peers:
        peer.close()
