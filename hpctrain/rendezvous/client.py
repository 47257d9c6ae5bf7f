"""The client side of the rendezvous, on ranks above 0: find rank 0 and wait for the roster."""

import hashlib
import ipaddress
import json
import selectors
from collections import deque
from typing import Any, BinaryIO

from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import RankMissingError, StartError, UsageError, repeated
from hpctrain.rendezvous.addresses import Names, candidate_hosts, ports
from hpctrain.rendezvous.key_value_store import KeyValueStore
from hpctrain.rendezvous.messages import (
    GRACE_SECONDS,
    LONGEST_GREETING,
    LONGEST_LINE,
    STATUS_SECONDS,
    Announce,
    Clock,
    Credentials,
    Entry,
    decode,
    encode,
    keep_alive,
    unpack,
)
from hpctrain.rendezvous.probe import Probe
from hpctrain.rendezvous.roster import Roster, make_roster

__all__ = ["RendezvousClient"]

# Connections under way at once. An unknown peer that accepts and sends nothing holds one of them,
# without a delay for the others. A rank 0 with thousands of clients may take some seconds.
_ATTEMPTS = 16
_ATTEMPT_SECONDS = 20.0
_CROWDED_SECONDS = 1.0  # minimum time for the oldest of them when all are in use
# Pause after a refused connection, as many ranks may try many hosts.
_BRAKE_SECONDS = 0.002
_FEW_ADDRESSES = 8
# Time for a connection before the next one is tried in parallel ("Happy Eyeballs", RFC 8305).
_HEAD_START_SECONDS = 0.05
_PAUSES = (0.005, 0.5)  # between two rounds of all places: first and longest pause
# Minimum wait even if no name resolves: name servers fail under the queries of a large start.
_MIN_WAIT_SECONDS = 10.0
_STORE_SECONDS = (0.1, 2.0)  # between two reads of the store: before a value is there, and after


class RendezvousClient:
    """The client of the rendezvous on a rank above 0.

    Args:
        world, point: place of this rank and rendezvous point, from its launcher.
        credentials: credentials of this start.
        entry: data about this rank for all other ranks.
        store: key-value store in which rank 0 publishes its addresses, or None.
        timeout: seconds until the client gives up.
        announce: function called with a status line for the user when waiting takes long.
        noun: what a rank is called in texts.
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
        noun: str,
        clock: Clock,
    ) -> None:
        self.world = world
        self.noun = noun
        self.credentials = credentials
        self.entry = entry
        self.store = store
        self.timeout = timeout
        self.announce = announce
        self.clock = clock
        self.hosts = candidate_hosts(world, point)
        self.names = Names(point.host, point.simulated or bool(world.on_one_host))
        self.ports = ports(point)
        self.selector = selectors.DefaultSelector()
        self.attempts: dict[tuple[str, int], Probe] = {}
        self.answers: dict[tuple[str, int], str] = {}
        self.round = 0
        self.lost_connection = ""  # how the last connection to rank 0 was lost
        self.published: list[tuple[str, int]] = []
        self.next_read = self.next_try = 0.0
        self.began = self.clock()
        self.deadline = self.began + timeout
        self.resolve_deadline = self.began + _MIN_WAIT_SECONDS

    def join(self) -> tuple[Roster, str]:
        """Find rank 0, and return the roster and the nonce of this start.

        Raises:
            RankMissingError: rank 0 cannot be found, or was lost.
            HpctrainError: the error that rank 0 sent.
        """
        with self.selector:
            while True:
                probe, challenge = self._find()
                with probe.connection:
                    outcome = self._exchange(probe, challenge)
                if outcome is not None:
                    return outcome
                # An earlier start may have answered just before its end. That is over soon.
                self.deadline = min(self.deadline, self.clock() + _MIN_WAIT_SECONDS)

    def _find(self) -> tuple[Probe, str]:
        """Return a connection to rank 0, which has proved its identity, and its challenge."""
        next_status = self.clock() + STATUS_SECONDS
        pause, next_round = _PAUSES[0], 0.0
        places: deque[tuple[str, int]] = deque()
        try:
            while (now := self.clock()) < self.deadline:
                if not places and now >= next_round:
                    places.extend(self._places())
                    # Many ranks may try many hosts.
                    next_round = now + pause * max(1.0, len(places) / 128)
                    pause = min(2 * pause, _PAUSES[1])
                room = self._has_room(now)
                if places and room and now >= self.next_try:
                    self._try(places.popleft())
                wake = next_round
                if places:
                    wake = self.next_try if room else now + _HEAD_START_SECONDS
                wait = max(0.0, min(wake, self.deadline) - self.clock())
                for key, _ in self.selector.select(wait):
                    found = self._continue(key.data)
                    if found is not None:
                        return found
                self._drop_old()
                if now > next_status:
                    self.announce(
                        f"{self.noun} {self.world.rank} looks for {self.noun} 0: "
                        f"{self._describe_attempts()}"
                    )
                    next_status = now + STATUS_SECONDS
                if not self.attempts and self.names.wrong and now > self.resolve_deadline:
                    break
        finally:
            for attempt in list(self.attempts.values()):
                self._drop(attempt, self.answers.get(attempt.place, "no answer"))
        raise self._not_found()

    def _places(self) -> list[tuple[str, int]]:
        """Return the places to try next: those in the store, then all hosts port by port."""
        if self.store is not None and self.clock() >= self.next_read:
            self._read_store()
        found = [address for _, address in self.names.resolve(self.hosts)]
        if found or self.store is not None:
            self.resolve_deadline = self.clock() + _MIN_WAIT_SECONDS
        ports = self.ports
        if len(found) > _FEW_ADDRESSES and len(ports) > 1:
            # Rank 0 nearly always gets the first port: try it in each round, the others in turn.
            self.round += 1
            ports = [ports[0], ports[1 + self.round % (len(ports) - 1)]]
        every = [*self.published, *((address, port) for port in ports for address in found)]
        return [place for place in dict.fromkeys(every) if place not in self.attempts]

    def _read_store(self) -> None:
        """Read rank 0's addresses from the key-value store."""
        assert self.store is not None
        value = decode(self.store.read(self.credentials.start) or b"")
        try:
            self.published = _published_places(value) if value else []
        except (KeyError, TypeError, ValueError):
            self.published = []  # a value of another program, or an incomplete one
        self.next_read = self.clock() + _STORE_SECONDS[bool(self.published)]

    def _try(self, place: tuple[str, int]) -> None:
        """Begin to connect to a place."""
        try:
            attempt = Probe(place, self.credentials, self.clock)
        except OSError as error:
            self.answers[place] = error.strerror or str(error)
            self.next_try = self.clock() + _BRAKE_SECONDS
            return
        self.attempts[place] = attempt
        self.selector.register(attempt.connection, attempt.awaits, attempt)
        self.next_try = self.clock() + _HEAD_START_SECONDS

    def _continue(self, attempt: Probe) -> tuple[Probe, str] | None:
        """Continue an attempt; return it with the challenge if it leads to rank 0."""
        try:
            challenge = attempt.advance()
        except OSError as error:
            self._drop(attempt, error.strerror or str(error))
            return None
        if challenge is None:
            self.selector.modify(attempt.connection, attempt.awaits, attempt)
            return None
        self.selector.unregister(attempt.connection)
        del self.attempts[attempt.place]
        return attempt, challenge

    def _has_room(self, now: float) -> bool:
        """Check whether one more connection may begin; drop an old one that gets no answer.

        The dropped place is tried again in the next round.
        """
        if len(self.attempts) >= _ATTEMPTS:
            oldest = next(iter(self.attempts.values()))
            if now - oldest.began > _CROWDED_SECONDS:
                self._drop(oldest, "no answer")
        return len(self.attempts) < _ATTEMPTS

    def _drop_old(self) -> None:
        limit = self.clock() - _ATTEMPT_SECONDS
        for attempt in [probe for probe in self.attempts.values() if probe.began < limit]:
            self._drop(attempt, "no answer")

    def _drop(self, attempt: Probe, reason: str) -> None:
        self.answers[attempt.place] = reason
        self.selector.unregister(attempt.connection)
        attempt.connection.close()
        del self.attempts[attempt.place]
        self.next_try = self.clock() + _BRAKE_SECONDS

    def _exchange(self, probe: Probe, challenge: str) -> tuple[Roster, str] | None:
        """Send this rank's entry and wait for the roster; return None if the connection is lost."""
        connection, peer = probe.connection, probe.place[0]
        hello = json.dumps([self.world.rank, self.world.world_size, self.entry])
        proof = self.credentials.proof("client", challenge, hello)
        try:
            keep_alive(connection)
            connection.settimeout(GRACE_SECONDS)
            connection.sendall(encode({"proof": proof, "hello": hello}))
            # Rank 0 may wait so long for other ranks. Keep-alive ends the connection if it is lost.
            connection.settimeout(self.timeout + 2 * GRACE_SECONDS)
            with connection.makefile("rb") as reader:
                roster = last = self._read(reader, probe.challenge + challenge)
                if roster is not None and "roster" in roster:
                    connection.sendall(encode({"received": self.world.rank}))
                    last = self._read(reader, probe.challenge + challenge)
        except OSError as error:
            self.lost_connection = f"{peer} answered, then was lost: {error.strerror or error}"
            return None
        if roster is None or last is None:
            self.lost_connection = f"{peer} answered, then closed the connection"
            return None
        if "error" in last:
            wrong_use = last["exit_code"] == UsageError.exit_code
            kind = UsageError if wrong_use else StartError
            raise repeated(kind.__name__, *last["error"])
        entries = unpack(roster["roster"], self.world.world_size)
        addresses, port = tuple(roster["addresses"]), roster["port"]
        return make_roster(entries, addresses, port, self.noun), roster["nonce"]

    def _read(self, reader: BinaryIO, challenges: str) -> dict[str, Any] | None:
        """Return a message of rank 0; None if there is none, or its proof is wrong."""
        proof = (decode(reader.readline(LONGEST_GREETING)) or {}).get("proof")
        line = reader.readline(LONGEST_LINE)
        digest = hashlib.sha256(line).hexdigest()
        return (
            decode(line) if self.credentials.proves(proof, "message", challenges, digest) else None
        )

    def _describe_attempts(self) -> str:
        """Describe the result of the last attempt at each address."""
        ports_by_text: dict[str, list[str]] = {}
        answers = dict.fromkeys(self.attempts, "no answer yet") | self.answers
        for (address, port), reason in answers.items():
            ports_by_text.setdefault(f"{address}: {reason}", []).append(str(port))
        names = {address: name for name, address in self.names.resolve(self.hosts)}
        parts = [text for text in (self.lost_connection, *self.names.wrong.values()) if text]
        for text, at in list(ports_by_text.items())[:8]:
            address = text.partition(": ")[0] if ": " in text else text
            name = names.get(address, address)
            where = f"{name} = " if name != address else ""
            more = ", …" if len(at) > 3 else ""
            parts.append(f"{where}{text} (port{'s' * (len(at) > 1)} {', '.join(at[:3])}{more})")
        if self.store is not None and not self.published:
            parts.append(f"no address in {self.store.where}")
        return "; ".join(parts) or "no answer yet"

    def _not_found(self) -> RankMissingError:
        waited = self.clock() - self.began
        where = ", ".join(self.hosts[:8]) + (", …" if len(self.hosts) > 8 else "")
        return RankMissingError(
            "HT202",
            f"{self.noun} {self.world.rank} on {self.entry['host']} did not find {self.noun} 0"
            + (f" at {where}" if where else "")
            + f" within {waited:.0f} s ({self._describe_attempts()})",
            f"{self.noun} 0 listening there",
            f"look for the first error in the log of {self.noun} 0",
            f"if it is on another host or has another name: export {env_vars.MAIN_ADDRESS}=HOST",
        )


def _published_places(value: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the addresses and ports that rank 0 has published.

    Raises:
        KeyError, TypeError, ValueError: the value has another format.
    """
    port = value["port"]
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(port)
    return [(str(ipaddress.ip_address(address)), port) for address in value["addresses"]]
