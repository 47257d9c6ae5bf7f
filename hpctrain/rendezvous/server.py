"""The server side of the rendezvous: rank 0 waits for all ranks and sends them the roster."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.cluster.texts import listed, ranks_text
from hpctrain.errors import ContradictionError, HpctrainError, RankMissingError, StartError
from hpctrain.rendezvous.addresses import LOOPBACK, candidate_hosts, listen, open_listener, ports
from hpctrain.rendezvous.connections import Connection, greet, serve, until, welcome
from hpctrain.rendezvous.interfaces import reachable
from hpctrain.rendezvous.messages import (
    GRACE_SECONDS,
    LONGEST_HELLO,
    STATUS_SECONDS,
    Credentials,
    Entry,
    Participant,
    encode,
    keep_alive,
    read_hello,
)
from hpctrain.rendezvous.roster import Answer, Roster, make_roster, pack

__all__ = ["RendezvousServer"]

# Seconds in which rank 0 still sends an error to ranks that were not yet connected.
_LINGER_SECONDS = 1.0
# The oldest unknown peer is dismissed if their number exceeds that of the ranks by more than this.
_MORE_UNKNOWN = 256


class RendezvousServer:
    """The server of the rendezvous on rank 0.

    Args:
        own: this rank.
        check: function called with the roster before it is sent, for what rank 0 tells the other
            ranks; an error that it raises is sent to all ranks.
    """

    def __init__(self, own: Participant, check: Callable[[Roster], Answer | None]) -> None:
        self.own, self.check = own, check
        self.size, self.noun, self.clock = own.world.world_size, own.noun, own.clock
        self.nonce = Credentials.challenge()
        self.objects: dict[str, Any] = {}
        self.entries: dict[int, Entry] = {0: read_hello(own.hello, self.objects)[2]}
        self.lost: dict[int, str] = {}  # hosts of ranks whose connection was lost
        self.by_rank: dict[int, Connection] = {}
        self.ranks: dict[Connection, int] = {}  # also of a second process with a rank
        self.unknown: dict[Connection, None] = {}  # a dict keeps the order of arrival
        self.wrong: ContradictionError | None = None
        self.refusal = b""  # the answer to ranks that connect after an error
        self.accept_error = ""
        self.changed = asyncio.Event()  # set when a rank has connected or was lost
        self.listener, self.taken, self.listen_error = listen(
            candidate_hosts(own.world, own.point), ports(own.point)
        )
        self.ports = [port for _, port in self.taken]
        if self.listener is not None:
            self.ports.append(self.listener.getsockname()[1])
            keep_alive(self.listener)  # and each connection that it accepts

    async def gather(self) -> tuple[Roster, Any, Any, str, socket.socket]:
        """Wait for all ranks.

        Returns:
            The roster, the answer for all ranks and for this one, the nonce, and the socket for the
            backend's store.

        Raises:
            HpctrainError: the start failed; all ranks that can be reached raise the same error.
        """
        accepting = listener = None
        # A second rank 0 of the same start may hold an earlier port. Two manual starts with one
        # key would share their ranks.
        probes = [asyncio.create_task(self._probe(place)) for place in self.taken]
        try:
            if self.listener is None:
                await asyncio.wait(probes, timeout=_LINGER_SECONDS)
                self._refuse_ports()
            accepting = asyncio.create_task(
                serve(self.listener, self._serve, LONGEST_HELLO, self._note_refusal)
            )
            self._publish_addresses()
            await self._wait()
            roster = make_roster(tuple(self.entries[rank] for rank in range(self.size)), self.noun)
            addresses = self._addresses(roster)
            listener = open_listener(addresses[0], 0)
            port = listener.getsockname()[1]
            roster = dataclasses.replace(roster, addresses=addresses, port=port)
            answer = self.check(roster) or Answer()
            # A rank that is lost from here on is named as the backend connects the ranks.
            await self._send_all(
                encode({"roster": pack(roster, answer.shared), "nonce": self.nonce}),
                GRACE_SECONDS + self.size / 500,
                lambda rank: json.dumps(answer.of(rank)),
            )
        except HpctrainError as error:
            await self._give_up(error)
            if listener:
                listener.close()
            raise
        finally:
            if self.own.store is not None:
                self.own.store.clear(self.own.credentials.start)
            if accepting is not None:
                accepting.cancel()
            if self.listener is not None:
                self.listener.close()
        return roster, answer.shared, answer.of(0), self.nonce, listener

    def _note_refusal(self, error: OSError) -> None:
        self.accept_error = f"{error.strerror} (ulimit -n)"

    async def _serve(self, peer: Connection) -> None:
        """Converse with a peer: unknown until it has proved that it belongs to this start."""
        most = _MORE_UNKNOWN + self.size
        hello = await welcome(peer, self.own.credentials, self.unknown, most)
        if hello is None:
            return
        with contextlib.suppress(ValueError):
            await self._serve_rank(peer, *read_hello(hello, self.objects))

    async def _serve_rank(self, peer: Connection, rank: int, size: int, entry: Entry) -> None:
        """Register a rank, and wait for the end of its connection."""
        self.ranks[peer] = rank
        try:
            if self.refusal:
                self.entries.setdefault(rank, entry)
                self._send(peer, self.refusal)
            elif not self._contradicts(rank, size, entry):
                before = self.by_rank.get(rank)
                self.by_rank[rank], self.entries[rank] = peer, entry
                self.lost.pop(rank, None)
                if before is not None:  # the same process has connected again
                    before.close()
            self.changed.set()
            await peer.read()
        finally:
            del self.ranks[peer]
            if self.by_rank.get(rank) is peer:
                del self.by_rank[rank]
                self.lost[rank] = self.entries.pop(rank)["host"]
            self.changed.set()

    def _contradicts(self, rank: int, size: int, entry: Entry) -> bool:
        """Check whether a new rank contradicts the others, and note the error."""
        known = self.entries.get(rank)
        if size != self.size:
            self.wrong = ContradictionError(
                "HT206.world-size-differs", server=self, rank=rank, entry=entry, size=size
            )
        elif known and known["process"] != entry["process"]:
            self.wrong = ContradictionError(
                "HT205.rank-twice", noun=self.noun, rank=rank, first=known, second=entry
            )
        return self.wrong is not None

    async def _probe(self, place: tuple[str, int]) -> None:
        """Check whether a second rank 0 is at an earlier port; it gets the same error."""
        with contextlib.suppress(OSError):
            other, challenge = await greet(place, self.own.credentials)
            with contextlib.closing(other):
                if self.refusal:
                    return
                proof = self.own.credentials.proof("client", challenge, self.own.hello)
                other.send(encode({"proof": proof, "hello": self.own.hello}))
                self.wrong = ContradictionError(
                    "HT205.rank-0-twice", noun=self.noun, first=self.entries[0], port=place[1]
                )
                self.changed.set()
                await other.read()

    async def _wait(self) -> None:
        """Wait until all ranks are connected.

        Raises:
            ContradictionError: two ranks contradict each other.
            RankMissingError: names the ranks that did not connect.
        """
        started, left = self.clock(), self.own.timeout
        while not await until(
            self.changed,
            lambda: self.wrong or len(self.entries) == self.size,
            min(left, STATUS_SECONDS),
        ):
            waited = self.clock() - started
            left = self.own.timeout - waited
            if left <= 0:
                raise self._missing()
            waiting = ranks_text(self._absent(), noun=self.noun)
            self.own.announce(f"waiting for {waiting} of {self.size} since {waited:.0f} s")
        if self.wrong:
            raise self.wrong

    async def _send_all(
        self, line: bytes, patience: float, own: Callable[[int], str] = lambda _: ""
    ) -> None:
        """Send a line to all ranks, each with a text of its own, and wait until it is sent."""
        for peer, rank in self.ranks.items():
            self._send(peer, line, own(rank))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*(p.sent() for p in self.ranks), return_exceptions=True)

    def _send(self, peer: Connection, line: bytes, own: str = "") -> None:
        """Send a line, and a text for this rank alone."""
        text = hashlib.sha256(line).hexdigest() + own
        proof = self.own.credentials.proof("message", peer.challenges, text)
        peer.send(encode({"proof": proof, "own": own}), line)

    async def _give_up(self, error: HpctrainError) -> None:
        """Send the error to all ranks; after a contradiction also to those that connect late."""
        self.refusal = encode({"error": list(error.args), "exit_code": error.exit_code})
        await self._send_all(self.refusal, GRACE_SECONDS)
        if isinstance(error, ContradictionError):
            await until(self.changed, lambda: not self._absent(), _LINGER_SECONDS)

    def _refuse_ports(self) -> NoReturn:
        """Raise an error because no port is free; a second rank 0 of this start gets it too.

        Raises:
            ContradictionError: a second rank 0 of this start holds a port.
            StartError: other programs hold the ports.
        """
        if self.wrong:
            raise self.wrong
        if len(self.ports) == 1:
            raise StartError("HT204.port-in-use", server=self, port=self.ports[0])
        raise StartError("HT204.ports-in-use", server=self, ports=", ".join(map(str, self.ports)))

    def _publish_addresses(self) -> None:
        """Publish the addresses and the port in the key-value store."""
        store = self.own.store
        if store is None:
            return
        own = [LOOPBACK] if self.own.world.on_one_host else [*reachable(), LOOPBACK]
        value = json.dumps({"addresses": own, "port": self.ports[-1]})
        try:
            store.write(self.own.credentials.start, value.encode())
        except OSError as error:
            raise StartError("HT203.address-not-published", own=self.own, error=error) from None

    def _absent(self) -> list[int]:
        return sorted(set(range(self.size)) - set(self.entries))

    def _missing(self) -> RankMissingError:
        missing = ranks_text(self._absent(), noun=self.noun)
        hosts = {rank: entry["host"] for rank, entry in self.entries.items()} | self.lost
        connected = ranks_text(self.entries, hosts, self.noun)
        state = f"connected: {connected}" + "".join(
            f"; {self.noun} {r} on {h} connected and was lost" for r, h in self.lost.items()
        )
        came = set(hosts.values())
        missing_hosts = [host for host in self.own.world.hosts or () if host not in came]
        if missing_hosts:
            state += f"; no connection from {listed(missing_hosts)}"
        if self.accept_error:
            state += f"; connections could not be accepted: {self.accept_error}"
        key = "HT201.ranks-missing-or-slow" if self.own.option else "HT201.ranks-missing"
        port = self.ports[-1]
        return RankMissingError(key, server=self, missing=missing, state=state, port=port)

    def _addresses(self, roster: Roster) -> tuple[str, ...]:
        """Return addresses by rank: of the requested interface, else of the connections to rank 0.

        Raises:
            ContradictionError: the interface is loopback, and there are several hosts.
        """
        simulated, several = self.own.point.simulated, len(roster.hosts) > 1
        for rank, entry in enumerate(roster.entries):
            address = entry["address"]
            if several and address and is_loopback(address) and not simulated:
                raise ContradictionError(
                    "HT207.loopback-interface", rank=rank, entry=entry, nodes=len(roster.hosts)
                )
        by_host: dict[int, str] = {}
        for rank, host in enumerate(roster.host_of_rank):
            if host not in by_host:
                by_host[host] = self._address(rank, roster)
        return tuple(by_host[host] for host in roster.host_of_rank)

    def _address(self, rank: int, roster: Roster) -> str:
        """Return the address of a rank's host."""
        given = roster.entries[rank]["address"]
        if given or rank:
            return given or self.by_rank[rank].address
        home = roster.host_of_rank[0]
        elsewhere = (other for other, host in enumerate(roster.host_of_rank) if host != home)
        first = next(elsewhere, None)
        if first is None:
            return LOOPBACK
        return self.by_rank[first].own_address
