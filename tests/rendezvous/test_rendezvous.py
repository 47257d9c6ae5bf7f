"""Rendezvous: ranks find rank 0, get the same roster, and name missing ranks."""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import hashlib
import http.server
import json
import os
import socket
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st
from processes import until

from hpctrain import rendezvous
from hpctrain.cluster.launchers.base import LauncherStore, RendezvousPoint
from hpctrain.cluster.texts import ranks_text
from hpctrain.cluster.world import World
from hpctrain.errors import CheckpointError, ContradictionError, StartError, UsageError
from hpctrain.rendezvous import Answer, Roster, interfaces, meet, ports
from hpctrain.rendezvous.messages import STATUS_SECONDS, Credentials, encode, hello, keep_alive
from hpctrain.rendezvous.roster import pack, unpack

HOME = "127.0.0.1"
PATIENCE = 60.0  # seconds until a hang is an error; all that works takes much less
NEVER = 1e9  # a time-out that ends only if a test moves the clock by so much
EARLY = 11.0  # the clock moves by so much at a time, where a client must end long before NEVER


def new_key():
    """Return a key whose first ports are free; another program may listen on a random one."""
    while True:
        key = uuid.uuid4().hex
        with contextlib.suppress(OSError):
            for port in ports(RendezvousPoint(key, "a"))[:2]:
                socket.create_server((HOME, port)).close()
            return key


def rendezvous_point(host="a", key=None, port=None):
    return RendezvousPoint(key or new_key(), host, HOME, port)


@pytest.fixture
def key():
    return new_key()


@pytest.fixture
def start():
    """Return a function that runs one rank in a thread; its `ended` returns all outcomes."""
    threads, outcomes = [], []

    def start_rank(world, point, entry=None, timeout=PATIENCE, **more):
        place = len(outcomes)
        outcomes.append(None)

        def run():
            try:
                outcomes[place] = meet(world, point, entry or {}, timeout, **more)
            except Exception as error:
                outcomes[place] = error

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return threads[-1]

    def ended(thread=None):
        for each in [thread] if thread else threads:
            each.join(PATIENCE)
            assert not each.is_alive(), "a rank still waits"
        return outcomes

    start_rank.ended = ended
    yield start_rank
    for outcome in ended():
        if isinstance(outcome, rendezvous.Rendezvous) and outcome.listener is not None:
            outcome.listener.close()


def start_all(start, key, hosts, local_ranks, port=None, **more):
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        world = World(rank, len(hosts), local_rank, launcher="env")
        start(world, rendezvous_point(host, key, port), {"note": rank}, **more)
    return start.ended()


def connect(port):
    """Connect to a port as soon as a server listens on it; return the connection."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((HOME, port), timeout=PATIENCE)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "no server listens"
            time.sleep(0.005)


@contextmanager
def accept_client(listener, credentials):
    """Accept a client and answer as rank 0 does; yield connection, reader and challenge."""
    connection, _ = listener.accept()
    with connection, connection.makefile() as reader:
        challenge = json.loads(reader.readline())["challenge"]
        proof = credentials.proof("host", challenge)
        connection.sendall(encode({"proof": proof, "challenge": "1"}))
        reader.readline()
        yield connection, reader, challenge


@contextmanager
def join_as(point, rank, size, secret="", host="a", last=False):
    """Connect to rank 0 and send a valid hello, by the protocol alone.

    Args:
        point: of the rendezvous.
        rank, size, secret, host: of the rank.
        last: whether it is the last rank: then rank 0 soon listens no more.
    """
    credentials = Credentials(point.key, secret)
    with connect(ports(point)[0]) as connection, connection.makefile() as reader:
        answer = greet(credentials, connection, reader)
        local_rank = rank if host == "a" else 0
        place = {"local_rank": local_rank, "node_rank": None, "hosts": None}
        entry = {"host": host, "pid": 1, "process": "1", "address": None, "world": place}
        text = hello(rank, size, entry, {})
        proof = credentials.proof("client", answer["challenge"], text)
        connection.sendall(encode({"hello": text, "proof": proof}))
        if not last:
            # When rank 0 answers another connection, it has read the hello.
            with connect(ports(point)[0]) as other, other.makefile() as answers:
                greet(credentials, other, answers)
        yield reader


def same_rosters(results):
    """Check whether all ranks have one roster; only rank 0 has the entries."""
    rosters = {dataclasses.replace(result.roster, entries=()) for result in results}
    return len(rosters) == 1


def greet(credentials, connection, reader):
    """Greet rank 0, and return its answer."""
    connection.sendall(encode({"start": credentials.start, "challenge": "client"}))
    answer = json.loads(reader.readline())
    assert credentials.proves(answer["proof"], "host", "client")
    return answer


class Server:
    """Rank 0 in a thread, on a clock that only the test moves."""

    def __init__(self, start, size, point, **more):
        self.clock, self.point, self.messages = Clock(), point, []
        words = {"announce": self.messages.append, "clock": self.clock, **more}
        self.thread = start(World(0, size, 0), point, timeout=NEVER, **words)

    def move(self, seconds):
        """Move the clock, and wake rank 0 by connections that send nothing."""
        self.clock.move(seconds)
        for port in ports(self.point)[:2]:
            with contextlib.suppress(OSError):
                socket.create_connection((HOME, port), timeout=PATIENCE).close()

    def waits_for(self, ranks):
        """Wait until rank 0 announces that it waits for these ranks and no others."""
        self.messages.clear()
        until(
            lambda: any(line.startswith(f"waiting for {ranks} of ") for line in self.messages),
            lambda: self.move(STATUS_SECONDS / 4),  # a new connection may stay for 10 s
        )

    def end(self, seconds):
        """Move the clock by so many seconds at a time until rank 0 ends."""
        until(lambda: not self.thread.is_alive(), lambda: self.move(seconds))


class Client:
    """A rank above 0 in a thread, on a running clock that the test also moves."""

    def __init__(self, start, world, point, **more):
        self.clock, self.messages = Clock(time.monotonic), []
        self.thread = start(
            world, point, timeout=NEVER, announce=self.messages.append, clock=self.clock, **more
        )

    def wait_for_message(self, text):
        """Wait until the rank announces a text."""
        until(
            lambda: any(text in line for line in self.messages),
            lambda: self.clock.move(STATUS_SECONDS + 1),
        )

    def end(self, seconds):
        """Move the clock by so many seconds at a time until the rank ends."""
        until(lambda: not self.thread.is_alive(), lambda: self.clock.move(seconds))


def is_disconnected(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "nodes"),
    [
        ("aaa", (0, 1, 2), (0, 0, 0)),
        ("aab", (0, 1, 0), (0, 0, 1)),
        ("abab", (0, 0, 1, 1), (0, 1, 0, 1)),
        ("baaca", (0, 0, 1, 0, 2), (0, 1, 1, 2, 1)),
    ],
)
def test_all_ranks_get_the_same_roster_and_a_complete_world(start, key, hosts, local_ranks, nodes):
    results = start_all(start, key, hosts, local_ranks)
    names = tuple(dict.fromkeys(hosts))
    for rank, result in enumerate(results):
        place = (local_ranks[rank], hosts.count(hosts[rank]), nodes[rank])
        assert result.world == World(rank, len(hosts), *place, len(names), names, "env")
        assert result.nonce == results[0].nonce
        assert (result.listener is None) == (rank > 0)
    assert same_rosters(results)
    roster = results[0].roster
    assert [entry["note"] for entry in roster.entries] == list(range(len(hosts)))
    assert [entry["host"] for entry in roster.entries] == list(hosts)
    assert roster.addresses == (HOME,) * len(hosts)
    assert roster.port == results[0].listener.getsockname()[1]
    socket.create_connection((HOME, roster.port), timeout=PATIENCE).close()


def test_node_ranks_and_hostnames_of_the_launcher_take_precedence(start, key):
    hosts = ("node1", "node2")
    for rank, node in enumerate((1, 0, 1)):
        world = World(rank, 3, rank // 2, (1, 2)[node], node, 2, hosts, "slurm")
        start(world, rendezvous_point("the-same-name-everywhere", key))
    results = start.ended()
    places = [(result.world.node_rank, result.world.local_world_size) for result in results]
    assert places == [(1, 2), (0, 1), (1, 2)]
    assert {m.world.hosts for m in results} == {hosts}
    assert same_rosters(results)


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
    "no JSON": b"\xff\x00\xfe\n",
    "a JSON list": b"[1, 2]\n",
    "no start": b"{}\n",
    "another start": b'{"start": "0123456789abcdef0123456789abcdef", "challenge": "1"}\n',
    "a start of another alphabet": '{"start": "\u00e9", "challenge": "1"}\n'.encode(),
    "numbers": b'{"start": 1, "challenge": 2}\n',
    "deep nesting": b"[" * 60_000 + b"\n",
    "no end": b"x" * 140_000,
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_unknown_peers_are_disconnected_and_silent_ones_do_not_delay_ranks(start, key, words):
    point = rendezvous_point(key=key)
    start(World(0, 2, 0), point)
    with connect(ports(point)[0]) as silent, connect(ports(point)[0]) as unknown:
        unknown.sendall(words)
        assert is_disconnected(unknown)
        start(World(1, 2, 1), rendezvous_point(key=key))
        for result in start.ended():
            assert result.roster.host_names == ["a", "a"]
        assert is_disconnected(silent)


@contextmanager
def occupied_port(port, answer):
    """Run another server on a port, which answers with some bytes or not at all."""
    with socket.create_server((HOME, port)) as server:
        end = threading.Event()

        def serve():
            connections = []
            while not end.is_set():
                connection, _ = server.accept()
                connections.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()
            for connection in connections:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            socket.create_connection((HOME, port), timeout=PATIENCE).close()
            thread.join(PATIENCE)


@pytest.mark.parametrize("answer", [None, b"", b"SSH-2.0\r\n", b"{}\n", b"\xff\n"])
def test_occupied_port_is_skipped_by_all_ranks(start, key, answer):
    given_port = ports(rendezvous_point())[0]
    with occupied_port(given_port, answer):
        results = start_all(start, key, "aab", (0, 1, 0), given_port)
        assert same_rosters(results)


def test_two_jobs_on_one_port_stay_separate(start):
    keys = {job: new_key() for job in "AB"}
    port = ports(rendezvous_point())[0]

    def jobs(roster):
        return Answer(shared=[entry["job"] for entry in roster.entries])

    def start_rank(job, number):
        point = rendezvous_point(key=keys[job], port=port)
        return start(World(number, 3, number), point, {"job": job}, check=jobs)

    start_rank("A", 0)
    start_rank("A", 1)
    connect(port).close()
    # All ranks of B meet and end while A still waits on the port of both.
    for thread in [start_rank("B", number) for number in range(3)]:
        start.ended(thread)
    start_rank("A", 2)
    for job, result in zip("AABBBA", start.ended(), strict=True):
        assert result.shared == [job] * 3


@pytest.mark.parametrize(
    ("joined", "named"),
    [((1, 3), "rank 2"), ((2,), "ranks 1 and 3"), ((), "ranks 1-3")],
)
def test_timeout_names_missing_ranks_on_every_rank(start, key, joined, named):
    server = Server(start, 4, rendezvous_point(key=key))
    for rank in joined:
        start(World(rank, 4, rank), rendezvous_point(key=key), timeout=NEVER)
    server.waits_for(named)
    server.move(NEVER)
    for outcome in start.ended():
        assert isinstance(outcome, StartError)
        assert outcome.code == "HT201"
        assert outcome.found.startswith(f"{named} of 4 did not connect within")
        assert f"(connected: {ranks_text((0, *joined))} on a)" in outcome.found


def test_texts_about_nodes_have_no_rank_and_no_option(start, key):
    """The agents of `hpctrain run` are one on each host, and there is no --start-timeout."""
    words = {"noun": "node", "option": ""}
    server = Server(start, 3, rendezvous_point(key=key), **words)
    start(World(1, 3, 0), rendezvous_point("b", key), timeout=NEVER, **words)
    server.waits_for("node 2")
    server.move(NEVER)
    for outcome in start.ended():
        assert outcome.found.startswith("node 2 of 3 did not connect within")
        assert "(connected: nodes 0 and 1 on a and b)" in outcome.found
        assert "rank" not in str(outcome).lower()
        assert "--" not in str(outcome)


def test_client_looks_for_a_node(start, key):
    client = Client(start, World(1, 2, 0), rendezvous_point("b", key), noun="node", option="")
    client.wait_for_message(f"node 1 looks for node 0: {HOME}: ")
    client.end(NEVER)
    (outcome,) = start.ended()
    assert outcome.found.startswith(f"node 1 on b did not find node 0 at {HOME}")
    assert "rank" not in str(outcome).lower()


def test_timeout_names_rank_that_joined_and_died(start, key):
    point = rendezvous_point(key=key)
    server = Server(start, 3, point)
    with join_as(point, 1, 3):
        server.waits_for("rank 2")
    server.waits_for("ranks 1 and 2")
    server.move(NEVER)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert outcome.found.startswith("ranks 1 and 2 of 3 did not connect")
    assert "rank 1 on a connected and was lost" in outcome.found


def test_client_without_server_lists_the_addresses_it_tried(start, key):
    point = rendezvous_point("b", key)
    client = Client(start, World(1, 2, 0), point)
    client.wait_for_message(f"rank 1 looks for rank 0: {HOME}: ")
    client.end(NEVER)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert outcome.found.startswith(f"rank 1 on b did not find rank 0 at {HOME}")
    assert str(ports(point)[0]) in outcome.found
    assert outcome.code == "HT202"
    assert "HPCTRAIN_MAIN_ADDRESS" in outcome.fixes[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_main_address_is_refused_at_once(start, rank):
    start(World(rank, 2, 0, launcher="somebody"), RendezvousPoint("key", "a"))
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert "somebody started 2 ranks and does not give the address of rank 0" in outcome.found
    assert outcome.code == "HT203"
    assert "HPCTRAIN_MAIN_ADDRESS" in outcome.fixes[0]


@pytest.mark.parametrize("hosts", ["bc", "aa"], ids=["two-hosts", "one-hostname-and-pid"])
def test_duplicate_rank_is_refused_on_every_rank(start, key, hosts):
    """Use ranks with one host name and one pid, as in two containers."""
    server = Server(start, 3, rendezvous_point(key=key))
    twins = [start(World(1, 3, 0), rendezvous_point(host, key)) for host in hosts]
    for twin in twins:
        start.ended(twin)
    server.end(STATUS_SECONDS)  # else it would wait for rank 2, which never comes
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert outcome.code == "HT205"
        assert "two processes are rank 1: " in outcome.found
        assert all(f"{host} pid" in outcome.found for host in hosts)


def test_different_world_sizes_are_refused_on_every_rank(start, key):
    server = Server(start, 3, rendezvous_point(key=key))
    start.ended(start(World(2, 4, 2), rendezvous_point("b", key)))
    server.end(STATUS_SECONDS)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert outcome.code == "HT206"
        assert "rank 2 on b has world size 4, rank 0 on a has 3" in outcome.found


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
def test_error_of_one_rank_is_raised_on_every_rank(start, key, culprit, kind):
    error = kind.of_text("HT116", "torch is too old", "torch 2.6", "pip install torch", "or conda")
    for rank, host in enumerate("aab"):
        point = rendezvous_point(host, key)
        start(World(rank, 3, rank % 2), point, error=error if rank == culprit else None)
    for outcome in start.ended():
        assert outcome.found == f"rank {culprit} on {'aab'[culprit]}: torch is too old"
        assert (outcome.code, outcome.expected) == (error.code, error.expected)
        assert outcome.fixes == error.fixes
        assert outcome.exit_code == kind.exit_code


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "named"),
    [
        ("aab", (0, 0, 0), ("ranks 0 and 1", "local rank 0", "on a")),
        ("abb", (0, 1, 1), ("ranks 1 and 2", "local rank 1", "on b")),
        # LOCAL_RANK exported as the rank, on two hosts: no rank waits for the others.
        ("ab", (0, 1), ("rank 1", "local rank 1", "on b")),
        ("aabb", (0, 1, 2, 3), ("rank 2", "local rank 2", "on b")),
    ],
)
def test_wrong_local_ranks_are_refused_on_every_rank(start, key, hosts, local_ranks, named):
    for outcome in start_all(start, key, hosts, local_ranks):
        assert isinstance(outcome, UsageError)
        assert outcome.code == "HT206"
        for text in named:
            assert text in outcome.found


def test_world_of_one_opens_no_socket(monkeypatch):
    def fail(*arguments, **keywords):
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", fail)
    result = meet(World(0, 1, 0), RendezvousPoint("key", "laptop"), {"note": 1})
    assert result.world == World(0, 1, 0, 1, 0, 1, ("laptop",))
    assert result.listener is None
    assert result.roster.entries[0]["note"] == 1
    with pytest.raises(UsageError, match=r"^torch is too old"):
        meet(
            World(0, 1, 0),
            RendezvousPoint("k", "a"),
            {},
            error=UsageError.of_text("HT116", "torch is too old"),
        )


@given(st.text(), st.none() | st.integers(1, 65535))
def test_ports_follow_from_the_job_and_avoid_ephemeral_ones(key, given_port):
    point = RendezvousPoint(key, "a", port=given_port)
    tried = ports(point)
    assert tried == ports(RendezvousPoint(key, "elsewhere", HOME, given_port))
    assert len(set(tried)) == len(tried) >= 8
    if given_port is not None:
        assert tried[0] == given_port
    assert all(20000 <= port < 32000 for port in tried if port != given_port)


def test_similar_job_ids_get_different_ports():
    first = [ports(RendezvousPoint(f"slurm//{job}/0/", "a"))[0] for job in range(100_000, 100_500)]
    assert len(set(first)) > 450


def test_wrong_secret_is_refused_with_the_reason(start, key):
    points = [dataclasses.replace(rendezvous_point(key=key), secret=s) for s in ("s3cret", "other")]
    server = Server(start, 2, points[0])
    client = Client(start, World(1, 2, 1), points[1])
    client.wait_for_message("this start, with another HPCTRAIN_SECRET")
    client.end(NEVER)
    server.waits_for("rank 1")
    server.move(NEVER)
    host, client = start.ended()
    assert host.found.startswith("rank 1 of 2 did not connect")
    assert "this start, with another HPCTRAIN_SECRET" in client.found
    assert "s3cret" not in f"{points[0]} {host} {client}"


def test_secret_is_never_sent(start, key):
    point = dataclasses.replace(rendezvous_point(key=key), secret="s3cret")
    start(World(0, 2, 0), point)
    with join_as(point, 1, 2, "s3cret", last=True) as reader:
        assert "proof" in json.loads(reader.readline())
        line = reader.readline()
        assert "roster" in json.loads(line)
        assert "s3cret" not in line


@pytest.mark.parametrize(
    "hello",
    [
        "[1]",
        "{}",
        '[-1, 2, {"host": "a", "pid": 1}]',
        '[7, 2, {"host": "a"}]',
        "[true, 2, {}]",
        "x",
    ],
)
def test_malformed_hello_is_disconnected(start, key, hello):
    point = rendezvous_point(key=key)
    start(World(0, 2, 0), point)
    credentials = Credentials(key, "")
    with connect(ports(point)[0]) as connection, connection.makefile() as reader:
        answer = greet(credentials, connection, reader)
        proof = credentials.proof("client", answer["challenge"], hello)
        connection.sendall(encode({"hello": hello, "proof": proof}))
        assert is_disconnected(connection)
    start(World(1, 2, 1), point)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_server_is_found_on_any_host_of_the_job(start, key):
    """Use addresses of this machine as hosts; no server listens on the first ones."""
    hosts = ("127.0.0.9", "127.0.0.8", "127.0.0.7", HOME)
    point = RendezvousPoint(key, "a", None, sure=False, others=hosts, simulated=True)
    for rank in range(3):
        start(World(rank, 3, rank), point)
    assert same_rosters(start.ended())


def test_shared_file_leads_to_server_and_is_removed(start, key, tmp_path):
    for rank, host in enumerate("abc"):
        point = RendezvousPoint(key, host, "127.0.0.9", sure=False, simulated=True)
        start(World(rank, 3, 0), point, folder=tmp_path / "runs")
    assert same_rosters(start.ended())
    assert not list(tmp_path.iterdir())


def test_unwritable_shared_folder_is_refused_with_the_fix(start, key, tmp_path):
    (tmp_path / "file").touch()
    point = RendezvousPoint(key, "a", None, sure=False)
    start(World(0, 2, 0), point, folder=tmp_path / "file")
    (outcome,) = start.ended()
    assert "cannot publish its address" in outcome.found
    assert outcome.code == "HT203"
    assert "HPCTRAIN_MAIN_ADDRESS" in outcome.fixes[0]


class FakeHorovodrun(http.server.BaseHTTPRequestHandler):
    """A stand-in for horovodrun's key-value server; the real one needs Horovod."""

    values = {}

    def do_PUT(self):
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send(200, b"")

    def do_GET(self):
        value = self.values.get(self.path)
        self.send(404 if value is None else 200, value or b"")

    def send(self, code, value):
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *arguments):
        pass


def test_horovodrun_key_value_store_leads_to_server(start, key):
    with http.server.ThreadingHTTPServer((HOME, 0), FakeHorovodrun) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = LauncherStore("horovodrun", HOME, server.server_address[1])
        for rank, host in enumerate("aab"):
            point = RendezvousPoint(key, host, None, sure=False, store=store, simulated=True)
            start(World(rank, 3, rank % 2), point)
        results = start.ended()
        server.shutdown()
    assert same_rosters(results)


@pytest.mark.parametrize(
    ("resolves", "message"),
    [
        (OSError(-2, "Name or service not known"), "node1 does not resolve: Name or"),
        (["127.0.1.1"], "node1 resolves to 127.0.1.1, which is this host"),
    ],
    ids=["unknown", "this-host"],
)
def test_client_gives_up_early_on_unresolvable_hostname(start, key, monkeypatch, resolves, message):
    def getaddrinfo(host, *arguments, **keywords):
        if isinstance(resolves, OSError):
            raise resolves
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in resolves]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    client = Client(start, World(1, 2, 0), RendezvousPoint(key, "node2.cluster", "node1"))
    client.end(EARLY)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert message in outcome.found
    assert "rank 1 on node2.cluster did not find rank 0 at node1" in outcome.found


def test_own_hostname_at_127_0_1_1_works_on_one_host(start, key, monkeypatch):
    real = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **keywords):
        return real("127.0.1.1" if host == "node1" else host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for rank in range(3):
        start(World(rank, 3, rank), RendezvousPoint(key, "node1.cluster", "node1"))
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_client_gives_up_early_where_server_died(start, key):
    point = rendezvous_point(key=key)
    with socket.create_server((HOME, ports(point)[0])) as dying:
        client = Client(start, World(1, 3, 1), point)
        with accept_client(dying, Credentials(key, "")):
            pass
    client.end(EARLY)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert f"{HOME} answered, then was lost: Connection reset by peer" in outcome.found


def test_unknown_network_interface_is_refused_on_every_rank(start, key):
    for rank in range(3):
        interface = "ib7" if rank == 1 else None
        start(
            World(rank, 3, rank),
            dataclasses.replace(rendezvous_point(key=key), interface=interface),
        )
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "there is no network interface 'ib7'" in outcome.found
        assert "lo (127.0.0.1" in outcome.expected
        assert outcome.code == "HT207"


def test_fixed_main_port_that_is_taken_is_refused(start, key):
    port = ports(rendezvous_point())[0]
    point = dataclasses.replace(rendezvous_point(key=key, port=port), only_port=True)
    assert ports(point) == [port]
    with occupied_port(port, b""):
        Server(start, 2, point)
        (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert f"rank 0 cannot listen on port {port} of " in outcome.found
    assert outcome.code == "HT204"
    assert [fix.partition("PORT (")[0] for fix in outcome.fixes] == [
        "export MASTER_PORT=",
        "hpctrain run --main-port ",
    ]


def test_two_jobs_with_one_fixed_main_port_are_both_refused(start, key):
    """Otherwise rank 1 of the second job could join the first one."""
    port = ports(rendezvous_point())[0]
    point = dataclasses.replace(rendezvous_point(key=key, port=port), only_port=True)
    first = Server(start, 2, point)
    connect(port).close()
    start.ended(start(World(0, 2, 0), point))
    first.end(STATUS_SECONDS)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "two processes are rank 0: " in outcome.found


def test_failed_roster_check_is_raised_on_every_rank(start, key):
    def check(roster):
        raise UsageError.of_text(
            "HT206", f"{len(roster.entries)} ranks", "other ones", "again", "later"
        )

    for rank in range(3):
        start(World(rank, 3, rank), rendezvous_point(key=key), check=check)
    for outcome in start.ended():
        assert (outcome.code, outcome.found) == ("HT206", "3 ranks")
        assert outcome.fixes == ("again", "later")


def test_each_rank_gets_the_answers_to_its_entry(start, key):
    def check(roster):
        notes = [entry["note"] for entry in roster.entries]
        return Answer(shared=sum(notes), own=[{"twice": 2 * note} for note in notes])

    results = start_all(start, key, "aab", (0, 1, 0), check=check)
    assert [(one.shared, one.own) for one in results] == [(3, {"twice": 2 * n}) for n in range(3)]
    assert [len(one.roster.entries) for one in results] == [3, 0, 0]


def test_equal_objects_of_ranks_are_one_object(start, key):
    """So rank 0 compares them once, whatever the number of ranks."""
    for rank in range(3):
        entry = {"settings": {"--lr": 1}, "command": ["a", rank // 2]}
        start(World(rank, 3, rank), rendezvous_point(key=key), entry)
    first, second, third = start.ended()[0].roster.entries
    assert first["settings"] is second["settings"] is third["settings"]
    assert first["command"] is second["command"] is not third["command"]


@given(
    st.lists(st.tuples(st.text(min_size=1), st.text(), st.integers(1, 3)), min_size=1, max_size=9),
    st.randoms(),
)
def test_packed_roster_round_trips(rows, random):
    hosts = tuple(host for host, _, _ in rows)
    ranks = [node for node, (_, _, count) in enumerate(rows) for _ in range(count)]
    random.shuffle(ranks)
    addresses = tuple(rows[node][1] for node in ranks)
    roster = Roster((), addresses, hosts, tuple(ranks), 5)
    assert unpack(pack(roster, [1, None])) == (roster, [1, None])


@pytest.mark.parametrize("cyclic", [False, True], ids=["block", "cyclic"])
def test_roster_of_many_ranks_is_short(cyclic):
    hosts = [f"node{number:04d}" for number in range(2048)]
    nodes = [rank % 2048 if cyclic else rank // 8 for rank in range(8 * 2048)]
    addresses = [f"10.1.{node // 256}.{node % 256}" for node in nodes]
    roster = Roster((), tuple(addresses), tuple(hosts), tuple(nodes), 5)
    assert len(pack(roster, [8] * 2048)) < 16_384


@pytest.mark.parametrize("host", ["b", "a"], ids=["two-hosts", "one-hostname-and-pid"])
def test_two_jobs_with_one_key_are_both_refused(start, key, host):
    """Start two trainings manually with one MASTER_PORT; the second finds rank 0 of the first."""
    port = ports(rendezvous_point())[0]
    point = rendezvous_point(key=key, port=port)
    first = Server(start, 3, point)
    client = start(World(1, 3, 1), point)
    connect(port).close()
    second = Server(start, 3, dataclasses.replace(point, host=host))
    start.ended(client)
    for server in (first, second):
        server.end(STATUS_SECONDS)
    for outcome in start.ended():
        assert isinstance(outcome, ContradictionError | UsageError)
        assert "two processes are rank 0: " in outcome.found
        assert f"{host} pid " in outcome.found
        assert outcome.code == "HT205"
        assert "its own port" in outcome.fixes[1]
        assert "its own HPCTRAIN_SECRET" in outcome.fixes[2]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"addresses": 1, "port": "x"}'),
        *('{"addresses": ["no such host"], "port": 5}', '{"addresses": "127.0.0.1", "port": 25}'),
        *('{"addresses": ["127.0.0.1"], "port": 99999}', '{"addresses": ["::1"], "port": true}'),
        '{"addresses": ["fe80::1%nowhere", "::1%x"], "port": 25}',
    ],
)
def test_unreadable_shared_file_is_read_again(start, key, tmp_path, text):
    (tmp_path / f".rendezvous-{Credentials(key, '').start}").write_text(text)
    point = RendezvousPoint(key, "a", None, sure=False, simulated=True)
    client = Client(start, World(1, 2, 1), point, folder=tmp_path)
    start(World(0, 2, 0), point, folder=tmp_path)
    client.end(1.0)  # the client reads the file every two seconds
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


@pytest.mark.parametrize(
    "address", ["node..1", ".", "a" * 64, "n\udcff", "fe80::1%nowhere", "fe80::1%lo", "a b"]
)
def test_client_gives_up_early_on_impossible_address(start, key, address):
    client = Client(start, World(1, 2, 0), RendezvousPoint(key, "b", address))
    client.end(EARLY)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert f"did not find rank 0 at {address} within" in outcome.found


def test_secret_may_hold_any_bytes(start, key):
    for rank in range(3):
        point = dataclasses.replace(rendezvous_point(key=key), secret=os.fsdecode(b"\xff\x80\n"))
        start(World(rank, 3, rank), point)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_hosts_with_one_hostname_keep_their_own_addresses(start, key):
    """Connect over 127.0.0.1 here; the machine has other addresses, too."""
    for rank in range(3):
        world = World(rank, 3, 0, 1, rank, 3, ("n1", "n2", "n3"), "slurm")
        start(world, RendezvousPoint(key, "same", "127.0.0.2", simulated=True))
    first = start.ended()[0]
    assert first.roster.addresses[0] == "127.0.0.2"


def test_tampered_message_is_ignored(start, key):
    """Send it from a relay, which has rank 0's answers to the challenges."""
    point = dataclasses.replace(rendezvous_point(key=key), secret="s3cret")
    credentials = Credentials(key, "s3cret")
    with socket.create_server((HOME, ports(point)[0])) as relay:
        client = Client(start, World(1, 2, 1), point)
        with accept_client(relay, credentials) as (connection, reader, challenge):
            genuine = encode({"roster": "", "nonce": "1"})
            digest = hashlib.sha256(genuine).hexdigest()
            proof = credentials.proof("message", challenge + "1", digest)
            evil = encode({"error": ["evil", "", ""], "code": 2})
            connection.sendall(encode({"proof": proof}) + evil)
            reader.readline()
    client.end(EARLY)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert "did not find rank 0" in outcome.found
    assert "evil" not in f"{outcome}"


def test_open_files_limit_is_named_without_a_busy_loop(start, key, monkeypatch):
    """Use a stand-in for accept, which fails as it does at the limit."""
    calls = []

    class FailingListener(socket.socket):
        def accept(self):
            calls.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

    def listen(*arguments):
        listener, *more = real(*arguments)
        failing = FailingListener(fileno=listener.detach())
        failing.setblocking(False)
        return failing, *more

    real = rendezvous.server.listen
    monkeypatch.setattr(rendezvous.server, "listen", listen)
    point, clock = rendezvous_point(key=key), Clock(time.monotonic)
    began = time.monotonic()
    start(World(0, 2, 0), point, timeout=NEVER, clock=clock)
    with connect(ports(point)[0]):
        until(lambda: len(calls) > 3)
        clock.move(NEVER)
        (outcome,) = start.ended()
    assert "connections could not be accepted: Too many open files (ulimit -n)" in outcome.found
    assert len(calls) < 3 + (time.monotonic() - began) / 0.1


def test_rendezvous_leaks_no_file_descriptor(start, key, tmp_path):
    start_all(start, uuid.uuid4().hex, "aab", (0, 1, 0))[0].listener.close()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            for result in start_all(start, uuid.uuid4().hex, "aab", (0, 1, 0))[-3:]:
                if result.listener is not None:
                    result.listener.close()
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def test_loopback_interface_is_refused_for_several_hosts(start, key):
    for rank, host in enumerate("abc"):
        point = dataclasses.replace(rendezvous_point(host, key), interface="lo")
        start(World(rank, 3, 0), point)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "the interface of rank 0 on a has the address 127.0.0.1" in outcome.found
        assert outcome.code == "HT207"
        assert "HPCTRAIN_INTERFACE" in outcome.fixes[0]


def test_authentication_answer_is_bound_to_side_challenge_and_text():
    credentials = Credentials("key", "secret")
    proof = credentials.proof("client", "challenge", "text")
    assert credentials.proves(proof, "client", "challenge", "text")
    assert not credentials.proves(proof, "host", "challenge", "text")
    assert not credentials.proves(proof, "client", "another", "text")
    assert not credentials.proves(proof, "client", "challenge", "another")
    assert not credentials.proves(None, "client", "challenge", "text")
    for other in (Credentials("another", "secret"), Credentials("key", "another")):
        assert not other.proves(proof, "client", "challenge", "text")
    assert Credentials("key", "a").start == Credentials("key", "b").start
    assert Credentials("key", "a").start != Credentials("another", "a").start
    assert len({Credentials.challenge() for _ in range(100)}) == 100


def test_replayed_hello_is_refused(start, key):
    """Send a recorded hello, whose proof answers another challenge."""
    point = rendezvous_point(key=key)
    start(World(0, 2, 0), point)
    credentials = Credentials(key, "")
    recorded = None
    for _ in range(2):
        with connect(ports(point)[0]) as connection, connection.makefile() as reader:
            challenge = greet(credentials, connection, reader)["challenge"]
            if recorded is None:
                text = json.dumps([1, 2, {"host": "evil"}, {}])
                proof = credentials.proof("client", challenge, text)
                recorded = encode({"hello": text, "proof": proof})
            else:
                connection.sendall(recorded)
                assert is_disconnected(connection)
    start(World(1, 2, 1), point)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_every_rendezvous_has_its_own_nonce(start, key):
    nonces = set()
    for _ in range(2):
        results = start_all(start, key, "aab", (0, 1, 0))[-3:]
        results[0].listener.close()
        nonces |= {one.nonce for one in results}
    assert len(nonces) == 2
    assert key not in nonces


def test_silent_peer_is_disconnected_after_a_timeout(start, key):
    point = rendezvous_point(key=key)
    server = Server(start, 3, point)
    with connect(ports(point)[0]) as silent:
        start(World(1, 3, 1), point)
        server.waits_for("rank 2")
        server.move(STATUS_SECONDS)
        assert is_disconnected(silent)
    start(World(2, 3, 2), point)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_oldest_of_too_many_unknown_peers_is_disconnected(start, key, monkeypatch):
    monkeypatch.setattr(rendezvous.server, "_MORE_UNKNOWN", 2)
    point = rendezvous_point(key=key)
    start(World(0, 2, 0), point)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(ports(point)[0])) for _ in range(8)]
        assert is_disconnected(silent[0])
        start(World(1, 2, 1), point)
        assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_rank_may_reconnect(start, key):
    """Lose the first connection of a rank without notice to rank 0, and connect again."""
    point = rendezvous_point(key=key)
    start(World(0, 3, 0), point)
    with join_as(point, 1, 3), join_as(point, 1, 3) as reader:
        thread = start(World(2, 3, 2), point)
        reader.readline()
        assert "roster" in json.loads(reader.readline())
        start.ended(thread)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_ranks_of_one_host_listen_on_loopback_only(start, key):
    point = RendezvousPoint(key, "a")
    start(World(0, 2, 0, num_nodes=1), point)
    connect(ports(point)[0]).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", ports(point)[0]), timeout=PATIENCE)
    start(World(1, 2, 1, num_nodes=1), point)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())


def test_keepalive_ends_lost_connections():
    with socket.socket() as connection:
        keep_alive(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, p) for p in probes)
        assert idle + interval * count <= 20
        timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert 0 < timeout <= 20_000


def test_accepted_connections_have_the_keepalive_of_their_listener():
    with socket.create_server((HOME, 0)) as listener:
        keep_alive(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT):
                own = listener.getsockopt(socket.IPPROTO_TCP, option)
                assert accepted.getsockopt(socket.IPPROTO_TCP, option) == own > 0


def test_bridge_addresses_are_listed_last(monkeypatch):
    found = {
        "docker0": ["172.17.0.1"],
        "lo": ["127.0.0.1", "::1"],
        "virbr0": ["192.168.122.1"],
        "eth0": ["10.0.0.1", "fd00::1"],
    }
    monkeypatch.setattr(interfaces, "addresses", lambda: found)
    assert interfaces.reachable() == ["10.0.0.1", "fd00::1", "172.17.0.1", "192.168.122.1"]


def test_server_is_found_quickly_among_many_hosts(start, key, monkeypatch):
    """Ask each host in every round, on the port that rank 0 nearly always has."""
    hosts = [f"127.0.{n // 200}.{n % 200 + 2}" for n in range(100)]
    point = RendezvousPoint(key, "a", None, sure=False, others=(*hosts, HOME), simulated=True)
    places = []
    real = asyncio.open_connection

    async def connect(*place, **more):
        places.append(place)
        return await real(*place, **more)

    monkeypatch.setattr(asyncio, "open_connection", connect)
    start(World(1, 2, 1), point)
    until(lambda: (HOME, ports(point)[0]) in places)
    places.clear()
    start(World(0, 2, 0), point)
    assert all(isinstance(outcome, rendezvous.Rendezvous) for outcome in start.ended())
    # The rest of one round, and another one: three ports of each host.
    assert len(places) <= 2 * 3 * 101
