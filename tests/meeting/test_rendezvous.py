"""Ranks find each other, count each other, and say who is missing."""

import dataclasses
import errno
import gc
import hashlib
import http.server
import json
import os
import socket
import struct
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain import meeting
from hpctrain.errors import CheckpointError, ContradictionError, StartError, UsageError
from hpctrain.launchers.base import MeetingPoint, Store
from hpctrain.meeting import interfaces, meet, ports
from hpctrain.meeting.messages import Credentials, encode, keep_alive, pack, unpack
from hpctrain.world import World

HOME = "127.0.0.1"
PATIENCE = 20.0  # seconds until a hang is called one; nothing that works comes near it


def meeting_point(host="a", key=None, port=None):
    return MeetingPoint(key or uuid.uuid4().hex, host, HOME, port)


@pytest.fixture
def key():
    return uuid.uuid4().hex


@pytest.fixture
def start():
    """Runs one rank in a thread; called again without arguments gives what came of all."""
    threads, outcomes = [], []

    def one(world, point, entry=None, timeout=PATIENCE, **more):
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

    one.ended = ended
    yield one
    for outcome in ended():
        if isinstance(outcome, meeting.Meeting) and outcome.listener is not None:
            outcome.listener.close()


def start_all(start, key, hosts, local_ranks, port=None, **more):
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        world = World(rank, len(hosts), local_rank, launcher="env")
        start(world, meeting_point(host, key, port), {"said": rank}, **more)
    return start.ended()


def knock(port):
    """A connection to whoever listens on a port, as soon as somebody does."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((HOME, port), timeout=PATIENCE)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.005)


@contextmanager
def introduced(point, rank, size, secret="", host="a"):
    """A connection to rank 0 that has said who it is, by the protocol alone."""
    credentials = Credentials(point.key, secret)
    with knock(ports(point)[0]) as connection, connection.makefile() as reader:
        connection.sendall(encode({"start": credentials.start, "challenge": "mine"}))
        answer = json.loads(reader.readline())
        assert credentials.proves(answer["proof"], "host", "mine")
        place = {
            "local_rank": rank if host == "a" else 0,
            "node_rank": None,
            "hosts": None,
            "launcher": "env",
        }
        entry = {"host": host, "pid": 1, "process": "1", "address": None, "world": place}
        hello = json.dumps([rank, size, entry])
        proof = credentials.proof("guest", answer["challenge"], hello)
        connection.sendall(encode({"hello": hello, "proof": proof}))
        yield reader


def is_sent_away(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def still_there(connection):
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
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
def test_all_ranks_learn_the_same_and_their_worlds_are_complete(
    start, key, hosts, local_ranks, nodes
):
    meetings = start_all(start, key, hosts, local_ranks)
    names = tuple(dict.fromkeys(hosts))
    for rank, met in enumerate(meetings):
        assert met.world == World(
            rank,
            len(hosts),
            local_ranks[rank],
            hosts.count(hosts[rank]),
            nodes[rank],
            len(names),
            names,
            "env",
        )
        assert met.roll == meetings[0].roll
        assert met.nonce == meetings[0].nonce
        assert (met.listener is None) == (rank > 0)
    roll = meetings[0].roll
    assert [entry["said"] for entry in roll.entries] == list(range(len(hosts)))
    assert [entry["host"] for entry in roll.entries] == list(hosts)
    assert roll.addresses == (HOME,) * len(hosts)
    assert roll.port == meetings[0].listener.getsockname()[1]
    socket.create_connection((HOME, roll.port), timeout=PATIENCE).close()


def test_the_names_and_numbers_of_the_launcher_count_where_it_has_them(start, key):
    hosts = ("node1", "node2")
    for rank, node in enumerate((1, 0, 1)):
        world = World(rank, 3, rank // 2, (1, 2)[node], node, 2, hosts, "slurm")
        start(world, meeting_point("the-same-name-everywhere", key))
    meetings = start.ended()
    assert [(m.world.node_rank, m.world.local_world_size) for m in meetings] == [
        (1, 2),
        (0, 1),
        (1, 2),
    ]
    assert {m.world.hosts for m in meetings} == {hosts}
    assert all(met.roll == meetings[0].roll for met in meetings)


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
    "no JSON": b"\xff\x00\xfe\n",
    "a JSON list": b"[1, 2]\n",
    "no start": b"{}\n",
    "another start": b'{"start": "0123456789abcdef0123456789abcdef", "challenge": "1"}\n',
    "a start of another alphabet": '{"start": "\u00e9", "challenge": "1"}\n'.encode(),
    "numbers": b'{"start": 1, "challenge": 2}\n',
    "deep nesting": b"[" * 60_000 + b"\n",
    "no end": b"x" * 70_000,
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_sent_away_and_nobody_waits_for_those_who_say_nothing(start, key, words):
    point = meeting_point(key=key)
    start(World(0, 2, 0), point)
    with knock(ports(point)[0]) as silent, knock(ports(point)[0]) as stranger:
        stranger.sendall(words)
        assert is_sent_away(stranger)
        start(World(1, 2, 1), meeting_point(key=key))
        for met in start.ended():
            assert [entry["host"] for entry in met.roll.entries] == ["a", "a"]
        assert is_sent_away(silent)


@contextmanager
def occupied(port, answer):
    """Somebody else on a port, who answers callers with some bytes, or with nothing at all."""
    with socket.create_server((HOME, port)) as server:
        leave = threading.Event()

        def serve():
            held = []
            while not leave.is_set():
                connection, _ = server.accept()
                held.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()
            for connection in held:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            leave.set()
            socket.create_connection((HOME, port), timeout=PATIENCE).close()
            thread.join(PATIENCE)


@pytest.mark.parametrize("answer", [None, b"", b"SSH-2.0\r\n", b"{}\n", b"\xff\n"])
def test_an_occupied_port_is_passed_over_by_all_ranks(start, key, answer):
    given_port = ports(meeting_point())[0]
    with occupied(given_port, answer):
        meetings = start_all(start, key, "aab", (0, 1, 0), given_port)
        assert all(met.roll == meetings[0].roll for met in meetings)


def test_two_starts_on_one_port_both_finish_and_never_mix(start):
    keys = {job: uuid.uuid4().hex for job in "AB"}
    port = ports(meeting_point())[0]

    def rank(job, number):
        point = meeting_point(key=keys[job], port=port)
        return start(World(number, 3, number), point, {"job": job})

    rank("A", 0)
    rank("A", 1)
    knock(port).close()
    # All of B come and go while A still waits on the port that both were given.
    for thread in [rank("B", number) for number in range(3)]:
        start.ended(thread)
    rank("A", 2)
    for job, met in zip("AABBBA", start.ended(), strict=True):
        assert [entry["job"] for entry in met.roll.entries] == [job] * 3


@pytest.mark.parametrize(
    ("came", "named"),
    [((0, 1, 3), "rank 2 of 4"), ((0, 2), "ranks 1, 3 of 4"), ((0,), "ranks 1, 2, 3 of 4")],
)
def test_ranks_that_never_come_are_named_to_all_that_did(start, key, came, named):
    for rank in came:
        start(World(rank, 4, rank), meeting_point(key=key), timeout=1.0)
    for outcome in start.ended():
        assert isinstance(outcome, StartError)
        assert outcome.found.startswith(f"{named} did not come")
        for rank in came:
            assert f"{rank} on a" in outcome.found


def test_a_rank_that_came_and_died_is_missing(start, key):
    point = meeting_point(key=key)
    start(World(0, 3, 0), point, timeout=1.0)
    with introduced(point, 1, 3):
        pass
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert outcome.found.startswith("ranks 1, 2 of 3 did not come")
    assert "rank 1 on a came and was lost" in outcome.found


def test_a_rank_that_finds_no_rank_0_says_where_it_looked(start, key, monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.0)
    point = meeting_point("b", key)
    start(World(1, 2, 0), point, timeout=0.2)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert outcome.found.startswith("rank 1 on b did not find rank 0 at 127.0.0.1")
    assert str(ports(point)[0]) in outcome.found
    assert "HPCTRAIN_MAIN_ADDRESS" in outcome.fix


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_nobody_told_where_to_meet_say_so_at_once(start, rank):
    start(World(rank, 2, 0, launcher="somebody"), MeetingPoint("key", "a"))
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert "somebody started 2 ranks and does not say where rank 0 is" in outcome.found
    assert "HPCTRAIN_MAIN_ADDRESS" in outcome.fix


def test_two_processes_with_one_rank_and_all_others_are_told(start, key, monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 1.0)
    for rank, host in ((0, "a"), (1, "b"), (1, "c")):
        start(World(rank, 3, 0), meeting_point(host, key), timeout=2.0)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "two processes say that they are rank 1: " in outcome.found
        assert "b pid" in outcome.found
        assert "c pid" in outcome.found


def test_ranks_that_count_differently_are_told(start, key):
    for rank, size in ((0, 3), (2, 4)):
        start(World(rank, size, rank), meeting_point("ab"[rank // 2], key))
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "rank 2 on b says 4 ranks, rank 0 on a says 3" in outcome.found


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
def test_an_error_that_one_rank_brings_is_raised_by_all(start, key, culprit, kind):
    error = kind("torch is too old", "torch 2.6", "pip install torch")
    for rank, host in enumerate("aab"):
        point = meeting_point(host, key)
        start(World(rank, 3, rank % 2), point, error=error if rank == culprit else None)
    for outcome in start.ended():
        assert outcome.found == f"rank {culprit} on {'aab'[culprit]}: torch is too old"
        assert (outcome.expected, outcome.fix) == (error.expected, error.fix)
        assert outcome.exit_code == kind.exit_code


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "named"),
    [
        ("aab", (0, 0, 0), ("ranks 0 and 1", "local rank 0", "on a")),
        ("abb", (0, 1, 1), ("ranks 1 and 2", "local rank 1", "on b")),
        # LOCAL_RANK exported as the rank, on two hosts: nobody is left to wait for the others.
        ("ab", (0, 1), ("rank 1", "local rank 1", "on b")),
        ("aabb", (0, 1, 2, 3), ("rank 2", "local rank 2", "on b")),
    ],
)
def test_local_ranks_that_their_hosts_have_no_place_for_are_refused_by_all(
    start, key, hosts, local_ranks, named
):
    for outcome in start_all(start, key, hosts, local_ranks):
        assert isinstance(outcome, UsageError)
        for text in named:
            assert text in outcome.found


def test_one_process_meets_nobody_and_opens_no_socket(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    met = meet(World(0, 1, 0), MeetingPoint("key", "laptop"), {"said": 1})
    assert met.world == World(0, 1, 0, 1, 0, 1, ("laptop",))
    assert met.listener is None
    assert met.roll.entries[0]["said"] == 1
    with pytest.raises(UsageError, match=r"^torch is too old"):
        meet(World(0, 1, 0), MeetingPoint("k", "a"), {}, error=UsageError("torch is too old"))


@given(st.text(), st.none() | st.integers(1, 65535))
def test_the_ports_to_try_follow_from_the_start_and_stay_out_of_the_way(key, given_port):
    point = MeetingPoint(key, "a", port=given_port)
    tried = ports(point)
    assert tried == ports(MeetingPoint(key, "elsewhere", HOME, given_port))
    assert len(set(tried)) == len(tried) >= 8
    if given_port is not None:
        assert tried[0] == given_port
    assert all(20000 <= port < 32000 for port in tried if port != given_port)


def test_jobs_whose_numbers_are_alike_try_other_ports():
    first = [ports(MeetingPoint(f"slurm//{job}/0/", "a"))[0] for job in range(100_000, 100_500)]
    assert len(set(first)) > 450


def test_without_the_secret_nobody_comes_in_and_it_is_said_why(start, key, monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.0)
    points = [dataclasses.replace(meeting_point(key=key), secret=s) for s in ("s3cret", "other")]
    start(World(0, 2, 0), points[0], timeout=2.0)
    start(World(1, 2, 1), points[1], timeout=1.0)
    host, guest = start.ended()
    assert host.found.startswith("rank 1 of 2 did not come")
    assert "this start, with another HPCTRAIN_SECRET" in guest.found
    assert "s3cret" not in f"{points[0]} {host} {guest}"


def test_with_the_secret_they_meet_and_no_word_of_it_is_sent(start, key, monkeypatch):
    monkeypatch.setattr(meeting.host, "GRACE_SECONDS", 0.5)
    point = dataclasses.replace(meeting_point(key=key), secret="s3cret")
    start(World(0, 3, 0), point)
    with introduced(point, 1, 3, "s3cret") as reader:
        start(World(2, 3, 2), point)
        assert "proof" in json.loads(reader.readline())
        said = reader.readline()
        assert "roll" in json.loads(said)
        assert "s3cret" not in said
    host, guest = start.ended()
    # The one by hand never said that it had heard.
    for outcome in (host, guest):
        assert "rank 1 of 3 came and was lost: the roll was not heard on a" in outcome.found


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
def test_nonsense_from_one_who_knows_the_start_is_sent_away_too(start, key, hello):
    point = meeting_point(key=key)
    start(World(0, 2, 0), point)
    credentials = Credentials(key, "")
    with knock(ports(point)[0]) as connection, connection.makefile() as reader:
        connection.sendall(encode({"start": credentials.start, "challenge": "mine"}))
        proof = credentials.proof("guest", json.loads(reader.readline())["challenge"], hello)
        connection.sendall(encode({"hello": hello, "proof": proof}))
        assert is_sent_away(connection)
    start(World(1, 2, 1), point)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_rank_0_is_found_at_whichever_host_it_is(start, key):
    """On addresses of this machine that stand for hosts; nobody listens on the first ones."""
    hosts = ("127.0.0.9", "127.0.0.8", "127.0.0.7", HOME)
    point = MeetingPoint(key, "a", None, sure=False, others=hosts, pretended=True)
    for rank in range(3):
        start(World(rank, 3, rank), point)
    first, *others = start.ended()
    assert all(met.roll == first.roll for met in others)


def test_a_word_on_a_board_leads_to_rank_0_and_is_gone_afterwards(start, key, tmp_path):
    for rank, host in enumerate("abc"):
        point = MeetingPoint(key, host, "127.0.0.9", sure=False, pretended=True)
        start(World(rank, 3, 0), point, folder=tmp_path / "runs")
    first, *others = start.ended()
    assert all(met.roll == first.roll for met in others)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", [b"", b"{", b"[]", b"{}", b'{"addresses": 1, "port": "x"}'])
def test_half_a_word_is_waited_for(start, key, tmp_path, word):
    start_name = Credentials(key, "").start
    (tmp_path / f".meeting-{start_name}").write_bytes(word)
    point = MeetingPoint(key, "a", None, sure=False, pretended=True)
    thread = start(World(1, 2, 1), point, folder=tmp_path)
    start(World(0, 2, 0), point, folder=tmp_path)
    start.ended(thread)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_a_board_that_cannot_be_written_says_what_to_set(start, key, tmp_path):
    (tmp_path / "file").touch()
    point = MeetingPoint(key, "a", None, sure=False)
    start(World(0, 2, 0), point, folder=tmp_path / "file")
    (outcome,) = start.ended()
    assert "cannot leave word" in outcome.found
    assert "HPCTRAIN_MAIN_ADDRESS" in outcome.fix


class Rendezvous(http.server.BaseHTTPRequestHandler):
    """A stand-in for horovodrun's server, by its protocol; the real one takes a real Horovod."""

    values = {}

    def do_PUT(self):
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, b"")

    def do_GET(self):
        value = self.values.get(self.path)
        self.answer(404 if value is None else 200, value or b"")

    def answer(self, code, value):
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *arguments):
        pass


def test_horovodruns_rendezvous_leads_to_rank_0(start, key):
    with http.server.ThreadingHTTPServer((HOME, 0), Rendezvous) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = Store("horovodrun", HOME, server.server_address[1])
        for rank, host in enumerate("aab"):
            point = MeetingPoint(key, host, None, sure=False, store=store, pretended=True)
            start(World(rank, 3, rank % 2), point)
        first, *others = start.ended()
        server.shutdown()
    assert all(met.roll == first.roll for met in others)


@pytest.mark.parametrize(
    ("name", "resolves", "said"),
    [
        ("node1", OSError(-2, "Name or service not known"), "node1 does not resolve: Name or"),
        ("node1", ["127.0.1.1"], "node1 resolves to 127.0.1.1, which is this host"),
    ],
)
def test_a_name_that_leads_nowhere_is_given_up_early_and_named(
    start, key, monkeypatch, name, resolves, said
):
    def getaddrinfo(host, *arguments, **keywords):
        if isinstance(resolves, OSError):
            raise resolves
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in resolves]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(meeting.guest, "_HOPELESS_SECONDS", 0.2)
    thread = start(World(1, 2, 0), MeetingPoint(key, "node2.cluster", name))
    start.ended(thread)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert said in outcome.found
    assert "rank 1 on node2.cluster did not find rank 0 at node1" in outcome.found


def test_an_own_name_at_127_0_1_1_is_no_hindrance_on_that_host(start, key, monkeypatch):
    real = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **keywords):
        return real("127.0.1.1" if host == "node1" else host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for rank in range(3):
        start(World(rank, 3, rank), MeetingPoint(key, "node1.cluster", "node1"))
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_a_rank_0_that_dies_is_given_up_soon(start, key, monkeypatch):
    monkeypatch.setattr(meeting.guest, "_HOPELESS_SECONDS", 0.3)
    point = meeting_point(key=key)
    credentials = Credentials(key, "")
    with socket.create_server((HOME, ports(point)[0])) as dying:
        start(World(1, 3, 1), point)
        connection, _ = dying.accept()
        with connection, connection.makefile() as reader:
            said = json.loads(reader.readline())
            proof = credentials.proof("host", said["challenge"])
            connection.sendall(encode({"proof": proof, "challenge": "1"}))
            reader.readline()
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert f"{HOME} answered, then closed the connection" in outcome.found


def test_an_interface_that_is_not_there_is_refused_by_all(start, key):
    for rank in range(3):
        interface = "ib7" if rank == 1 else None
        start(
            World(rank, 3, rank), dataclasses.replace(meeting_point(key=key), interface=interface)
        )
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "the network interface 'ib7' is not there" in outcome.found
        assert "lo (127.0.0.1" in outcome.expected


def test_where_the_port_alone_names_the_start_no_other_is_tried(start, key):
    port = ports(meeting_point())[0]
    point = dataclasses.replace(meeting_point(key=key, port=port), only_port=True)
    assert ports(point) == [port]
    with socket.create_server((HOME, port)):
        start(World(0, 2, 0), point)
        (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert f"rank 0 can listen on none of the ports {port}" in outcome.found
    assert "MASTER_PORT" in outcome.fix


def test_where_the_port_alone_names_the_start_a_second_one_ends_both(start, key):
    """The second's rank 1 could otherwise have come in the place of the first's."""
    port = ports(meeting_point())[0]
    point = dataclasses.replace(meeting_point(key=key, port=port), only_port=True)
    start(World(0, 2, 0), point)
    knock(port).close()
    start(World(0, 2, 0), point)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "two processes say that they are rank 0: " in outcome.found


def test_what_rank_0_finds_wrong_with_the_roll_is_raised_by_all(start, key):
    def check(roll):
        raise UsageError(f"{len(roll.entries)} ranks", "other ones", "try again")

    for rank in range(3):
        start(World(rank, 3, rank), meeting_point(key=key), check=check)
    for outcome in start.ended():
        assert (outcome.found, outcome.fix) == ("3 ranks", "try again")


@given(
    st.lists(
        st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(), max_size=4),
        min_size=1,
    )
)
def test_a_roll_comes_out_as_it_went_in(entries):
    names = {name for entry in entries for name in entry}
    whole = tuple({name: entry.get(name) for name in names} for entry in entries)
    assert unpack(pack(entries), len(entries)) == whole


def test_a_roll_says_once_what_all_have_in_common():
    entries = [{"versions": "torch 2.15.0" * 50, "rank": rank} for rank in range(1000)]
    assert len(pack(entries)) < 10 * len(entries)


def test_a_rank_whose_connection_is_reset_after_its_word_is_named_to_the_others(
    start, key, monkeypatch
):
    monkeypatch.setattr(meeting.host, "GRACE_SECONDS", 0.5)
    for rank in range(2):
        start(World(rank, 3, 0), meeting_point("ab"[rank], key), timeout=3.0)
    with introduced(meeting_point("c", key), 2, 3, host="c") as reader:
        reset = struct.pack("ii", 1, 0)
        reader.buffer.raw._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    for outcome in start.ended():
        assert isinstance(outcome, StartError)
        # Whichever rank 0 sees first: that all have come, or that one has gone.
        heard = "rank 2 of 3 came and was lost: the roll was not heard on c" in outcome.found
        assert heard or "rank 2 on c came and was lost" in outcome.found


def test_two_starts_under_one_name_are_both_refused_and_never_mix(start, key):
    """Two trainings by hand with one MASTER_PORT; the second finds the first one's rank 0."""
    port = ports(meeting_point())[0]
    point = meeting_point(key=key, port=port)
    start(World(0, 3, 0), point, {"start": "first"})
    start(World(1, 3, 1), point, {"start": "first"})
    knock(port).close()
    start(World(0, 3, 0), dataclasses.replace(point, host="b"), {"start": "second"})
    for outcome in start.ended():
        assert isinstance(outcome, ContradictionError | UsageError)
        assert "two processes say that they are rank 0: " in outcome.found
        assert "b pid " in outcome.found
        assert "a port of its own" in outcome.fix


@pytest.mark.parametrize(
    "word",
    [
        {"addresses": ["no such host"], "port": 5},
        {"addresses": [HOME], "port": 99999},
        {"addresses": [HOME], "port": True},
        {"addresses": ["fe80::1%nowhere", "::1%x"], "port": 25},
        {"addresses": "127.0.0.1", "port": 25},
    ],
)
def test_a_word_that_is_nonsense_is_waited_over(start, key, tmp_path, word):
    path = tmp_path / f".meeting-{Credentials(key, '').start}"
    path.write_text(json.dumps(word))
    point = MeetingPoint(key, "a", None, sure=False, pretended=True)
    start(World(1, 2, 1), point, folder=tmp_path)
    start(World(0, 2, 0), point, folder=tmp_path)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


@pytest.mark.parametrize(
    "address", ["node..1", ".", "a" * 64, "n\udcff", "fe80::1%nowhere", "fe80::1%lo", "a b"]
)
def test_an_address_that_cannot_be_is_named(start, key, monkeypatch, address):
    monkeypatch.setattr(meeting.guest, "_HOPELESS_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.0)
    start(World(1, 2, 0), MeetingPoint(key, "b", address), timeout=1.0)
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert f"did not find rank 0 at {address} within" in outcome.found


def test_a_secret_of_any_bytes_will_do(start, key):
    for rank in range(3):
        point = dataclasses.replace(meeting_point(key=key), secret=os.fsdecode(b"\xff\x80\n"))
        start(World(rank, 3, rank), point)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_hosts_of_one_name_that_the_launcher_tells_apart_have_addresses_of_their_own(start, key):
    """127.0.0.1 is this machine's only address here, but not every address that it has."""
    for rank in range(3):
        world = World(rank, 3, 0, 1, rank, 3, ("n1", "n2", "n3"), "slurm")
        start(world, MeetingPoint(key, "same", "127.0.0.2", pretended=True))
    first = start.ended()[0]
    assert first.roll.addresses[0] == "127.0.0.2"


def test_a_message_that_was_changed_on_the_way_is_not_believed(start, key, monkeypatch):
    """From one that has rank 0's answers to the challenges, as who relays them would have."""
    monkeypatch.setattr(meeting.guest, "_HOPELESS_SECONDS", 0.2)
    point = dataclasses.replace(meeting_point(key=key), secret="s3cret")
    credentials = Credentials(key, "s3cret")
    with socket.create_server((HOME, ports(point)[0])) as relay:
        start(World(1, 2, 1), point)
        connection, _ = relay.accept()
        with connection, connection.makefile() as reader:
            said = json.loads(reader.readline())
            proof = credentials.proof("host", said["challenge"])
            connection.sendall(encode({"proof": proof, "challenge": "1"}))
            reader.readline()
            genuine = encode({"roll": "", "addresses": [], "port": 1, "nonce": "1"})
            digest = hashlib.sha256(genuine).hexdigest()
            proof = credentials.proof("message", said["challenge"] + "1", digest)
            evil = encode({"error": ["evil", "", ""], "code": 2})
            connection.sendall(encode({"proof": proof}) + evil)
            reader.readline()
    (outcome,) = start.ended()
    assert isinstance(outcome, StartError)
    assert "did not find rank 0" in outcome.found
    assert "evil" not in f"{outcome}"


def test_a_rank_0_that_may_open_no_more_files_says_so_and_does_not_spin(start, key, monkeypatch):
    """A stand-in for a limit that is reached: accept fails as it does then."""
    calls = []

    class Full:
        def __init__(self, listener):
            self.listener = listener

        def __getattr__(self, name):
            return getattr(self.listener, name)

        def accept(self):
            calls.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

    real = meeting.host.Callers

    def callers(listener, *more):
        return real(Full(listener), *more)

    monkeypatch.setattr(meeting.host, "Callers", callers)
    point = meeting_point(key=key)
    start(World(0, 2, 0), point, timeout=1.0)
    with knock(ports(point)[0]):
        (outcome,) = start.ended()
    assert "callers were not let in: Too many open files (ulimit -n)" in outcome.found
    assert 1 < len(calls) < 30


def test_a_meeting_leaves_no_file_open(start, key, tmp_path):
    start_all(start, uuid.uuid4().hex, "aab", (0, 1, 0))[0].listener.close()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            for met in start_all(start, uuid.uuid4().hex, "aab", (0, 1, 0))[-3:]:
                if met.listener is not None:
                    met.listener.close()
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def test_an_interface_of_loopback_is_refused_for_several_hosts(start, key):
    for rank, host in enumerate("abc"):
        point = dataclasses.replace(meeting_point(host, key), interface="lo")
        start(World(rank, 3, 0), point)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert "the interface of rank 0 on a has the address 127.0.0.1" in outcome.found
        assert "HPCTRAIN_INTERFACE" in outcome.fix


def test_a_proof_is_good_for_one_thing_alone():
    ours = Credentials("key", "secret")
    proof = ours.proof("guest", "challenge", "text")
    assert ours.proves(proof, "guest", "challenge", "text")
    assert not ours.proves(proof, "host", "challenge", "text")
    assert not ours.proves(proof, "guest", "another", "text")
    assert not ours.proves(proof, "guest", "challenge", "another")
    assert not ours.proves(None, "guest", "challenge", "text")
    for other in (Credentials("another", "secret"), Credentials("key", "another")):
        assert not other.proves(proof, "guest", "challenge", "text")
    assert Credentials("key", "a").start == Credentials("key", "b").start
    assert Credentials("key", "a").start != Credentials("another", "a").start
    assert len({Credentials.challenge() for _ in range(100)}) == 100


def test_what_was_said_before_opens_no_second_meeting(start, key):
    """A hello that somebody recorded, with its proof, to another challenge."""
    point = meeting_point(key=key)
    start(World(0, 2, 0), point)
    credentials = Credentials(key, "")
    recorded = None
    for _ in range(2):
        with knock(ports(point)[0]) as connection, connection.makefile() as reader:
            connection.sendall(encode({"start": credentials.start, "challenge": "mine"}))
            challenge = json.loads(reader.readline())["challenge"]
            if recorded is None:
                hello = json.dumps([1, 2, {"host": "evil"}])
                proof = credentials.proof("guest", challenge, hello)
                recorded = encode({"hello": hello, "proof": proof})
            else:
                connection.sendall(recorded)
                assert is_sent_away(connection)
    start(World(1, 2, 1), point)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_each_start_has_a_nonce_of_its_own(start, key):
    nonces = set()
    for _ in range(2):
        met = start_all(start, key, "aab", (0, 1, 0))[-3:]
        met[0].listener.close()
        nonces |= {one.nonce for one in met}
    assert len(nonces) == 2
    assert key not in nonces


def test_a_stranger_who_says_nothing_is_sent_away_in_time(start, key, monkeypatch):
    monkeypatch.setattr(meeting.callers, "_STRANGER_SECONDS", 0.2)
    point = meeting_point(key=key)
    start(World(0, 3, 0), point)
    with knock(ports(point)[0]) as silent:
        start(World(1, 3, 1), point)
        # Rank 0 looks at its callers when somebody comes.
        deadline = time.monotonic() + PATIENCE
        silent.setblocking(False)
        while still_there(silent):
            assert time.monotonic() < deadline, "it may stay"
            knock(ports(point)[0]).close()
    start(World(2, 3, 2), point)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_of_many_strangers_the_oldest_makes_way(start, key, monkeypatch):
    monkeypatch.setattr(meeting.callers, "_STRANGERS", 2)
    point = meeting_point(key=key)
    start(World(0, 2, 0), point)
    with ExitStack() as stack:
        silent = [stack.enter_context(knock(ports(point)[0])) for _ in range(8)]
        assert is_sent_away(silent[0])
        start(World(1, 2, 1), point)
        assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_a_rank_may_come_again(start, key):
    """Its first connection was lost on the way, and rank 0 does not know yet."""
    point = meeting_point(key=key)
    start(World(0, 3, 0), point)
    with introduced(point, 1, 3), introduced(point, 1, 3) as reader:
        thread = start(World(2, 3, 2), point)
        reader.readline()
        assert "roll" in json.loads(reader.readline())
        reader.buffer.raw._sock.sendall(encode({"heard": 1}))
        reader.readline()
        assert json.loads(reader.readline()) == {"begin": True}
        start.ended(thread)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_where_all_ranks_are_on_one_host_nobody_else_can_call(start, key):
    point = MeetingPoint(key, "a")
    start(World(0, 2, 0, num_nodes=1), point)
    knock(ports(point)[0]).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", ports(point)[0]), timeout=PATIENCE)
    start(World(1, 2, 1, num_nodes=1), point)
    assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())


def test_a_lost_connection_ends_by_itself():
    with socket.socket() as connection:
        keep_alive(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, p) for p in probes)
        assert idle + interval * count <= 20
        timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert 0 < timeout <= 20_000


def test_addresses_that_every_host_has_are_told_last(monkeypatch):
    found = {
        "docker0": ["172.17.0.1"],
        "lo": ["127.0.0.1", "::1"],
        "virbr0": ["192.168.122.1"],
        "eth0": ["10.0.0.1", "fd00::1"],
    }
    monkeypatch.setattr(interfaces, "addresses", lambda: found)
    assert interfaces.reachable() == ["10.0.0.1", "fd00::1", "172.17.0.1", "192.168.122.1"]


def test_rank_0_is_found_soon_among_many_hosts_that_refuse(start, key):
    """Each of them is asked in every round, on the port that rank 0 nearly always has."""
    hosts = [f"127.0.{n // 200}.{n % 200 + 2}" for n in range(100)]
    point = MeetingPoint(key, "a", None, sure=False, others=(*hosts, HOME), pretended=True)
    asked = []
    real = meeting.guest.Knock

    def knocks(place, credentials):
        asked.append(place)
        return real(place, credentials)

    meeting.guest.Knock = knocks
    try:
        start(World(1, 2, 1), point)
        deadline = time.monotonic() + PATIENCE
        while (HOME, ports(point)[0]) not in asked:
            assert time.monotonic() < deadline, "it was never asked"
            time.sleep(0.01)
        asked.clear()
        start(World(0, 2, 0), point)
        assert all(isinstance(outcome, meeting.Meeting) for outcome in start.ended())
        # What was left of one round, and another one: two ports of each host.
        assert len(asked) <= 2 * 2 * 101
    finally:
        meeting.guest.Knock = real


@pytest.mark.parametrize("rank", [0, 1])
def test_two_containers_with_one_name_and_pid_are_two_processes(start, key, monkeypatch, rank):
    """Threads of one process have its pid, too."""
    monkeypatch.setattr(meeting.host, "GRACE_SECONDS", 0.5)
    point = meeting_point(key=key)
    start(World(0, 3, 0), point, timeout=3.0)
    start(World(1, 3, 1), point, timeout=3.0)
    knock(ports(point)[0]).close()
    start(World(rank, 3, rank), point, timeout=3.0)
    for outcome in start.ended():
        assert isinstance(outcome, UsageError)
        assert f"two processes say that they are rank {rank}: " in outcome.found
