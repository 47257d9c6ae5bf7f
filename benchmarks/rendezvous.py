"""Cost of the rendezvous with the consistency check, against connections alone.

    python benchmarks/rendezvous.py [--rounds 20] [--save FILE]

Two real ranks, which import torch before the clock starts, are compared with torch's own rendezvous
in the same round: a TCPStore and a barrier in it. 512, 4,096 and 16,384 ranks are compared with as
many clients of a server that reads one line and answers one line. There, rank 0 is real and runs in
this process. One other process simulates all other ranks: it uses their protocol, with proofs and
entries such as theirs (eight to a simulated host). It builds the roster for one rank only, because
a real process unpacks one roster, not thousands on the same core. All traffic uses loopback.
"""

import argparse
import datetime
import functools
import multiprocessing
import os
import secrets
import selectors
import socket
import time
from typing import Any

import crowd
import torch
from harness import Results, compare, run
from torch.distributed import TCPStore

from hpctrain.arguments import Options
from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.process import file_limit
from hpctrain.process.threads import Threads, divide
from hpctrain.rendezvous import Answer, Roster, consistency
from hpctrain.rendezvous import meet as hpctrain_meet
from hpctrain.rendezvous.addresses import LOOPBACK, ports
from hpctrain.rendezvous.messages import Credentials, Entry, decode, encode
from hpctrain.rendezvous.roster import unpack
from hpctrain.tools.bench.measure import take_turns

MEET, STORE = "meet", "TCPStore and a barrier"
AT_ONCE, BARE = "meet, all call at once", "a line each way"
CROWDS = (512, 4096, 16384)
CROWD_ROUNDS = 5  # at most, as each takes seconds
TIMEOUT = 120.0
# Most clients that wait for their first answer at the same time. Real ranks run in parallel; one
# process that first connects all clients would answer more slowly than any real rank.
WINDOW = 64
# A rank of a launcher is no fork: its first look at each module copies no memory.
CONTEXT = multiprocessing.get_context("spawn")
GATES: list[Any] = []  # of a process of one of two ranks
Figures = dict[str, float]


def make_entry() -> Entry:
    """Return the entry of a rank, as a Session makes it."""
    settings = Options.of(None, {}).deciding()
    return {**consistency.entry(torch.device("cpu"), settings), **Threads.here(os.environ).entry()}


def check(spent: Figures, roster: Roster) -> Answer:
    """Run the consistency check as a Session does, and record its time."""
    start = time.perf_counter()
    consistency.check(roster.entries, roster.host_names)
    answer = Answer(own=divide(roster.entries, roster.host_of_rank, 1))
    spent["check_s"] = time.perf_counter() - start
    return answer


# Two real ranks.


def meet(rank: int, key: str) -> Figures:
    """Run one of two ranks on one host up to its backend, and return the times."""
    start = time.perf_counter()
    entry = make_entry()
    spent = {"entry_s": time.perf_counter() - start}
    host = os.uname().nodename
    hpctrain_meet(
        World(rank, 2, rank, 2, 0, 1, (host,), "env"),
        RendezvousPoint(key, host, LOOPBACK),
        entry,
        TIMEOUT,
        check=functools.partial(check, spent),
    )
    return spent


def rendezvous(rank: int, port: int, stores: list[TCPStore]) -> Figures:
    """Run the minimum of torch's init_process_group: a store, and a barrier at the end."""
    limit = datetime.timedelta(seconds=TIMEOUT)
    store = TCPStore(LOOPBACK, port, 2, is_master=rank == 0, timeout=limit)
    stores.append(store)  # rank 0's store is the server of both
    if store.add("arrived", 1) == 2:
        store.set("all", "yes")
    store.wait(["all"])
    return {}


def keep_gate(gate: Any) -> None:
    """Keep the barrier of both ranks in the process of one of them."""
    GATES.append(gate)


def real_rank(arm: str, rank: int, key: str, port: int) -> Figures:
    """Run one rank and return its times; the clock starts when both have passed the gate."""
    torch.set_num_threads(1)
    [gate] = GATES
    stores: list[TCPStore] = []
    gate.wait(TIMEOUT)
    start = time.monotonic()
    spent = meet(rank, key) if arm == MEET else rendezvous(rank, port, stores)
    end = time.monotonic()
    gate.wait(TIMEOUT)
    return {"start": start, "end": end, **spent}


def pair(arm: str) -> Figures:
    """Run two new processes; return the seconds from both ready until both have finished."""
    key = secrets.token_hex(8)
    # Not a port of the range for outgoing connections: a client that is early could get the same
    # port as its own, connect to itself, and keep rank 0 from listening there.
    port = ports(RendezvousPoint(key, LOOPBACK))[0]
    with CONTEXT.Pool(2, keep_gate, (CONTEXT.Barrier(2),)) as pool:
        calls = [(arm, rank, key, port) for rank in range(2)]
        results = pool.starmap_async(real_rank, calls, chunksize=1).get(TIMEOUT)
    wall = max(own["end"] for own in results) - min(own["start"] for own in results)
    if arm == STORE:
        return {"s": wall}
    return {
        "s": wall,
        "check_s": max(own["entry_s"] for own in results) + results[0]["check_s"],
    }


# Many simulated ranks.


def await_listener(port: int) -> None:
    """Wait until a server listens at the port."""
    limit = time.monotonic() + TIMEOUT
    while time.monotonic() < limit:
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) == 0:
                return
        time.sleep(0.01)
    raise TimeoutError(f"no server listens at port {port}")


def simulated(arm: str, size: int, key: str, port: int, common: Entry) -> Figures:
    """Simulate all ranks above 0 in this process, and return the figures."""
    file_limit.make_room(size)
    rosters: list[bytes] = []
    window = size if arm == AT_ONCE else WINDOW
    if arm == BARE:
        callers = crowd.Crowd(size - 1, lambda _: crowd.one_line(), port, window)
    else:
        credentials = Credentials(key, "")
        hellos = [crowd.introduction(n, size, common) for n in range(size)]
        callers = crowd.Crowd(
            size - 1, lambda n: crowd.client(credentials, n, hellos[n], rosters), port, window
        )
    await_listener(port)
    start = time.monotonic()
    callers.call(TIMEOUT)
    figures = {"s": time.monotonic() - start}
    if rosters:
        start = time.perf_counter()
        roster = decode(rosters[0]) or {}
        unpack(roster["roster"])
        figures["unpack_s"] = time.perf_counter() - start
        figures |= {"roll_bytes": len(rosters[0]), "lost": callers.lost}
    return figures


def serve(size: int, port: int) -> None:
    """Run the baseline server, which answers one line of each client with one line."""
    answer = encode({"start": "0" * 32, "challenge": Credentials.challenge()})
    selector, answered = selectors.DefaultSelector(), 0
    with socket.create_server((LOOPBACK, port), backlog=4096) as listener:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while answered < size - 1:
            for key, _ in selector.select(TIMEOUT):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ, connection)
                    continue
                received = key.data.recv(1 << 16)
                if received:
                    key.data.sendall(answer)
                    answered += 1
                selector.unregister(key.data)
                key.data.close()
    selector.close()


def gathered(arm: str, size: int) -> Figures:
    """Run rank 0 and simulated ranks; return the seconds until the last one has finished."""
    key, common = secrets.token_hex(8), make_entry()
    own, hosts = crowd.entry(0, common), crowd.host_names(size)
    world = World(0, size, 0, crowd.PER_HOST, 0, len(hosts), hosts, "slurm")
    point = RendezvousPoint(key, hosts[0], LOOPBACK, simulated=True)
    port = ports(point)[0]
    spent: Figures = {}
    with CONTEXT.Pool(1) as pool:
        others = pool.apply_async(simulated, (arm, size, key, port, common))
        cpu = time.process_time()
        if arm == BARE:
            serve(size, port)
        else:
            met = hpctrain_meet(world, point, own, TIMEOUT, check=functools.partial(check, spent))
            if met.listener:
                met.listener.close()
        cpu = time.process_time() - cpu
        return {**others.get(TIMEOUT), "cpu_s": cpu, **spent}


# All measurements.


def measure(arguments: argparse.Namespace) -> Results:
    """Return the figures by number of ranks and arm."""
    file_limit.make_room(max(CROWDS))
    pairs = {arm: functools.partial(pair, arm) for arm in (STORE, MEET)}
    take_turns(pairs, 1)  # the first start of the fork server imports torch
    figures = {2: take_turns(pairs, arguments.rounds)}
    for size in CROWDS:
        crowds = {arm: functools.partial(gathered, arm, size) for arm in (BARE, MEET, AT_ONCE)}
        figures[size] = take_turns(crowds, min(arguments.rounds, CROWD_ROUNDS))
    results: Results = {}
    for size, arms in figures.items():
        base = STORE if size == 2 else BARE
        results[str(size)] = compare(arms, base, ("ratio", "more_s"))
    return results


if __name__ == "__main__":
    run("The cost of the rendezvous.", 20, ["hpctrain", "torch"], measure)
