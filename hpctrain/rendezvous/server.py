"""The server side of the rendezvous: rank 0 waits for all ranks and sends them the roster."""

import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers.base import RendezvousPoint, is_loopback
from hpctrain.cluster.texts import listed, ranks_text
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError, HpctrainError, RankMissingError, StartError
from hpctrain.rendezvous.addresses import LOOPBACK, candidate_hosts, ports
from hpctrain.rendezvous.interfaces import reachable
from hpctrain.rendezvous.key_value_store import KeyValueStore
from hpctrain.rendezvous.messages import (
    GRACE_SECONDS,
    STATUS_SECONDS,
    Announce,
    Clock,
    Credentials,
    Entry,
    encode,
    pack,
)
from hpctrain.rendezvous.peers import Peer, Peers, listen
from hpctrain.rendezvous.probe import Probe
from hpctrain.rendezvous.roster import Roster, make_roster

__all__ = ["RendezvousServer"]

# Seconds in which rank 0 still sends an error to ranks that were not yet connected.
_LINGER_SECONDS = 1.0


class RendezvousServer:
    """The server of the rendezvous on rank 0.

    Args:
        world, point: place of this rank and rendezvous point, from its launcher.
        credentials: credentials of this start.
        entry: data about this rank for all other ranks.
        store: key-value store in which to publish the addresses, or None.
        timeout: seconds to wait for all ranks.
        announce: function called with a status line for the user when waiting takes long.
        check: function called with the roster before it is sent; an error that it raises is sent
            to all ranks.
        noun: what a rank is called in texts.
        option: option that sets `timeout`; empty without one.
        clock: clock in seconds, for every time-out.
    """

    def __init__(
        self,
        world: World,
        point: RendezvousPoint,
        credentials: Credentials,
        entry: Entry,
        store: KeyValueStore | None,
        timeout: float,
        announce: Announce,
        check: Callable[[Roster], None],
        noun: str,
        option: str,
        clock: Clock,
    ) -> None:
        self.world = world
        self.noun = noun
        self.option = option
        self.simulated = point.simulated
        self.credentials = credentials
        self.store = store
        self.timeout = timeout
        self.announce = announce
        self.check = check
        self.clock = clock
        self.nonce = Credentials.challenge()
        self.entries: dict[int, Entry] = {0: entry}
        self.lost: dict[int, str] = {}  # hosts of ranks whose connection was lost
        self.by_rank: dict[int, Peer] = {}
        self.refusal: dict[str, Any] = {}  # the answer to peers that connect after an error
        self.listener, taken, self.listen_error = listen(
            candidate_hosts(world, point), ports(point)
        )
        self.ports = [port for _, port in taken]
        if self.listener is not None:
            self.ports.append(self.listener.getsockname()[1])
        self.peers = Peers(
            self.listener, credentials, world.world_size, self._arrived, self._left, clock
        )
        self._check_earlier_ports(taken)

    def gather(self) -> tuple[Roster, str, socket.socket]:
        """Wait for all ranks; return the roster, the nonce, and the socket for the backend's store.

        Raises:
            HpctrainError: the start failed; all ranks that can be reached raise the same error.
        """
        listener = None
        try:
            if self.listener is None:
                self._refuse_ports()
            self._publish_addresses()
            self._wait()
            entries = tuple(_for_all(self.entries[rank]) for rank in range(self.world.world_size))
            roster = make_roster(entries, noun=self.noun)
            addresses = self._addresses(roster)
            family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
            listener = socket.create_server((addresses[0], 0), family=family, backlog=4096)
            port = listener.getsockname()[1]
            roster = dataclasses.replace(roster, addresses=addresses, port=port)
            self.check(roster)
            self._send_roster(roster)
        except HpctrainError as error:
            self._give_up(error)
            if listener:
                listener.close()
            raise
        finally:
            if self.store is not None:
                self.store.clear(self.credentials.start)
            self.peers.close()
        return roster, self.nonce, listener

    def _refuse_ports(self) -> NoReturn:
        """Raise an error because no port is free; a second rank 0 of this start gets it too.

        Raises:
            ContradictionError: a second rank 0 of this start holds a port.
            StartError: other programs hold the ports.
        """
        limit = self.clock() + _LINGER_SECONDS
        while (left := limit - self.clock()) > 0 and self.peers.watches:
            self.peers.poll(left)
        only = len(self.ports) == 1
        free = f"PORT (one that is free on {self._home}, the same on all {self.noun}s)"
        fixes = (
            (f"export MASTER_PORT={free}", f"hpctrain run --main-port {free}")
            if only
            else (f"export {env_vars.MAIN_PORT}={free}",)
        )
        raise StartError(
            "HT204",
            f"{self.noun} 0 can listen on none of the ports {', '.join(map(str, self.ports))} of "
            f"{self.entries[0]['host']} ({self.listen_error})",
            "a free port: another start may have taken this one" if only else "one free port",
            *fixes,
        )

    def _give_up(self, error: HpctrainError) -> None:
        """Send the error to all ranks; after a contradiction also to those that connect late."""
        self.refusal = {"error": list(error.args), "exit_code": error.exit_code}
        self.peers.deliver(self.refusal, GRACE_SECONDS)
        if not isinstance(error, ContradictionError):
            return
        limit = self.clock() + _LINGER_SECONDS
        while self._absent() and (left := limit - self.clock()) > 0:
            self.peers.poll(left)

    def _check_earlier_ports(self, places: Sequence[tuple[str, int]]) -> None:
        """Check whether a second rank 0 of the same start holds an earlier port.

        Otherwise two manual starts with one key would share their ranks.
        """
        for place in places:
            with contextlib.suppress(OSError):
                probe = Probe(place, self.credentials, self.clock)
                self.peers.watch(
                    probe.connection, probe.awaits, partial(self._continue_probe, probe)
                )

    def _continue_probe(self, probe: Probe, _events: int) -> None:
        """Continue the probe of an earlier port.

        Raises:
            ContradictionError: a second rank 0 answers; it raises the same error.
        """
        try:
            challenge = probe.advance()
        except OSError:
            self.peers.watch(probe.connection, 0, None)
            probe.connection.close()
            return
        if challenge is None or self.refusal:
            self.peers.watch(probe.connection, probe.awaits, partial(self._continue_probe, probe))
            return
        entry = self.entries[0]
        hello = json.dumps([0, self.world.world_size, entry])
        proof = self.credentials.proof("client", challenge, hello)
        with contextlib.suppress(OSError):
            probe.connection.sendall(encode({"proof": proof, "hello": hello}))
        raise ContradictionError(
            "HT205",
            f"two processes are {self.noun} 0: {entry['host']} pid {entry['pid']} and the one that "
            f"listens at port {probe.place[1]} there",
            *self._once(),
        )

    def _publish_addresses(self) -> None:
        """Publish the addresses and the port in the key-value store."""
        if self.store is None:
            return
        own = [LOOPBACK] if self.world.on_one_host else [*reachable(), LOOPBACK]
        value = json.dumps({"addresses": own, "port": self.ports[-1]})
        try:
            self.store.write(self.credentials.start, value.encode())
        except OSError as error:
            raise StartError(
                "HT203",
                f"{self.noun} 0 cannot publish its address in {self.store.where}: {error}",
                f"a place that all {self.noun}s can read, or the name of {self._home}",
                f"export {env_vars.MAIN_ADDRESS}=HOST ({self._home}, on all {self.noun}s)",
            ) from None

    def _wait(self) -> None:
        started = self.clock()
        next_status = started + STATUS_SECONDS
        while len(self.entries) < self.world.world_size:
            now = self.clock()
            if now >= started + self.timeout:
                raise self._missing()
            if now >= next_status:
                waiting = ranks_text(self._absent(), noun=self.noun)
                self.announce(
                    f"waiting for {waiting} of {self.world.world_size} since {now - started:.0f} s"
                )
                next_status = now + STATUS_SECONDS
            self.peers.poll(min(next_status, started + self.timeout) - now)

    def _arrived(self, peer: Peer, hello: str) -> None:
        """Register a peer that has proved that it belongs to this start.

        Raises:
            ContradictionError: its rank is already in use, or its world size differs.
        """
        try:
            rank, size, entry = _read(hello)
        except ValueError:
            self.peers.dismiss(peer)
            return
        known = self.entries.get(rank)
        if self.refusal:
            self.entries.setdefault(rank, entry)
            self.peers.deliver(self.refusal, GRACE_SECONDS, to=(peer,))
            return
        if size != self.world.world_size:
            raise ContradictionError(
                "HT206",
                f"{self.noun} {rank} on {entry['host']} has world size {size}, {self.noun} 0 on "
                f"{self.entries[0]['host']} has {self.world.world_size}",
                f"the same world size on all {self.noun}s",
                f"hpctrain explain (in place of the script, on both {self.noun}s)",
            )
        if known and known["process"] != entry["process"]:
            raise ContradictionError(
                "HT205",
                f"two processes are {self.noun} {rank}: {known['host']} pid "
                f"{known['pid']} and {entry['host']} pid {entry['pid']}",
                *self._once(),
            )
        before = self.by_rank.get(rank)
        self.by_rank[rank] = peer
        self.entries[rank] = entry
        if before is not None:  # the same process has connected again
            self.peers.dismiss(before)
        self.lost.pop(rank, None)

    def _left(self, peer: Peer) -> None:
        for rank in [rank for rank, other_peer in self.by_rank.items() if other_peer is peer]:
            del self.by_rank[rank]
            self.lost[rank] = self.entries.pop(rank)["host"]

    def _send_roster(self, roster: Roster) -> None:
        """Send the roster to all ranks, and wait until all confirm it, so that no rank is lost.

        Raises:
            RankMissingError: names the ranks that did not confirm it.
        """
        patience = GRACE_SECONDS + self.world.world_size / 500
        message = {
            "roster": pack(roster.entries),
            "addresses": roster.addresses,
            "port": roster.port,
            "nonce": self.nonce,
        }
        self.peers.deliver(message, patience, wait_for_confirmation=True)
        others = range(1, self.world.world_size)
        unconfirmed = [r for r in others if r not in self.by_rank or not self.by_rank[r].confirmed]
        if unconfirmed:
            hosts = {roster.hosts[roster.host_of_rank[rank]]: None for rank in unconfirmed}
            raise RankMissingError(
                "HT201",
                f"{ranks_text(unconfirmed, noun=self.noun)} of {self.world.world_size} connected "
                f"and {_were(unconfirmed)} lost: no confirmation of the roster from "
                f"{listed(list(hosts))}",
                f"all {self.noun}s until the start is complete",
                "look for the first error in their logs, and whether the host can be reached",
            )
        self.peers.deliver({"begin": True}, patience)

    def _absent(self) -> list[int]:
        return sorted(set(range(self.world.world_size)) - set(self.entries))

    def _missing(self) -> RankMissingError:
        missing = self._absent()
        hosts = {rank: entry["host"] for rank, entry in self.entries.items()} | self.lost
        connected = ranks_text(self.entries, hosts, self.noun)
        details = "".join(
            f"; {self.noun} {r} on {h} connected and was lost" for r, h in self.lost.items()
        )
        missing_hosts = [host for host in self.world.hosts or () if host not in hosts.values()]
        if missing_hosts:
            details += f"; no connection from {listed(missing_hosts)}"
        if self.peers.accept_error:
            details += f"; connections could not be accepted: {self.peers.accept_error}"
        return RankMissingError(
            "HT201",
            f"{ranks_text(missing, noun=self.noun)} of {self.world.world_size} did not connect "
            f"within {self.timeout:.0f} s (connected: {connected}{details}). "
            f"{self.noun.capitalize()} 0 listened at port {self.ports[-1]} of "
            f"{self.entries[0]['host']}",
            f"all {self.noun}s",
            "look for the first error in their logs",
            f"for a slow file system: {self.option} SECONDS, longer than now"
            if self.option
            else "",
        )

    @property
    def _home(self) -> str:
        return "host 0" if self.noun == "host" else f"the host of {self.noun} 0"

    def _once(self) -> tuple[str, ...]:
        """Return what is expected of two processes with one number, and the fixes."""
        once = f"start each {self.noun} once, and give every start a"
        return (
            f"each {self.noun} once",
            f"{once} port of its own (MASTER_PORT or {env_vars.MAIN_PORT})",
            f"{once} {env_vars.SECRET} of its own",
        )

    def _addresses(self, roster: Roster) -> tuple[str, ...]:
        """Return addresses by rank: of the requested interface, else of the connections to rank 0.

        Raises:
            ContradictionError: the interface is loopback, and there are several hosts.
        """
        host_of_rank, home = roster.host_of_rank, roster.host_of_rank[0]
        for rank, entry in enumerate(roster.entries):
            wrong = entry["address"] and is_loopback(entry["address"]) and not self.simulated
            if len(roster.hosts) > 1 and wrong:
                raise ContradictionError(
                    "HT207",
                    f"the interface of rank {rank} on {entry['host']} has the address "
                    f"{entry['address']}, and the ranks are on {len(roster.hosts)} hosts",
                    "an interface that the other hosts reach",
                    f"unset {env_vars.INTERFACE} {env_vars.GLOO_INTERFACE}",
                )
        elsewhere = [rank for rank, host in enumerate(host_of_rank) if host != home]
        own = roster.entries[0]["address"] or (
            self.by_rank[elsewhere[0]].own if elsewhere else LOOPBACK
        )
        return tuple(
            own if host == home else roster.entries[rank]["address"] or self.by_rank[rank].address
            for rank, host in enumerate(host_of_rank)
        )


def _read(hello: str) -> tuple[int, int, Entry]:
    """Return the rank, world size and entry from a hello.

    Raises:
        ValueError: the text has another format.
    """
    fields = json.loads(hello)
    if not isinstance(fields, list) or [type(part) for part in fields] != [int, int, dict]:
        raise ValueError(hello)
    rank, size, entry = fields
    place = entry.get("world")
    whole = {"host", "pid", "process", "address"} <= entry.keys() and isinstance(place, dict)
    if not 0 <= rank < size or not whole or not {"local_rank", "node_rank"} <= place.keys():
        raise ValueError(hello)
    return rank, size, entry


def _for_all(entry: Entry) -> Entry:
    """Return an entry without the value that only rank 0 needs."""
    return {name: value for name, value in entry.items() if name != "process"}


def _were(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
