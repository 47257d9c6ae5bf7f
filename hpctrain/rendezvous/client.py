"""The client side of the rendezvous, on ranks above 0: find rank 0 and wait for the roster."""

import errno
import hashlib
import ipaddress
import json
from collections import deque
from collections.abc import Generator
from functools import partial
from typing import Any

from hpctrain.cluster import env_vars
from hpctrain.errors import HpctrainError, RankMissingError, StartError, UsageError, repeated
from hpctrain.rendezvous.addresses import Names, candidate_hosts, ports
from hpctrain.rendezvous.connections import Connection, Connections, Conversation, greet
from hpctrain.rendezvous.messages import (
    GRACE_SECONDS,
    LONGEST_LINE,
    STATUS_SECONDS,
    Participant,
    decode,
    encode,
    keep_alive,
)
from hpctrain.rendezvous.roster import Roster, unpack

__all__ = ["RendezvousClient"]

# Connections under way at once. An unknown peer that accepts and sends nothing holds one of them,
# without a delay for the others. A rank 0 with thousands of clients may take some seconds.
_ATTEMPTS = 16
_ATTEMPT_SECONDS = 20.0
_CROWDED_SECONDS = 1.0  # minimum time for the oldest of them when all are in use
# Pause after each attempt where many ranks may try many hosts, and what many addresses are.
_BRAKE_SECONDS = 0.002
_FEW_ADDRESSES = 8
# Time for a connection before the next one is tried in parallel ("Happy Eyeballs", RFC 8305).
_HEAD_START_SECONDS = 0.05
_PAUSES = (0.001, 0.5)  # between two rounds of all places: first and longest pause
# Minimum wait even if no name resolves: name servers fail under the queries of a large start.
_MIN_WAIT_SECONDS = 10.0
_STORE_SECONDS = (0.1, 2.0)  # between two reads of the store: before a value is there, and after

Place = tuple[str, int]


class RendezvousClient:
    """The client of the rendezvous on a rank above 0.

    Args:
        own: this rank.
    """

    def __init__(self, own: Participant) -> None:
        self.own, self.clock = own, own.clock
        self.hosts = candidate_hosts(own.world, own.point)
        self.names = Names(own.point.host, own.point.simulated or bool(own.world.on_one_host))
        self.ports = ports(own.point)
        self.connections = Connections(own.clock)
        self.attempts: dict[Place, Connection] = {}
        self.answers: dict[Place, str] = {}
        self.server: Connection | None = None  # the connection to rank 0
        self.outcome: tuple[Roster, Any, Any, str] | HpctrainError | None = None
        self.lost_connection = ""  # how the last connection to rank 0 was lost
        self.occupied = False  # whether another program has answered
        self.published: list[Place] = []
        self.places: deque[Place] = deque()  # what is left to try in this round
        self.round, self.pause = 0, _PAUSES[0]
        self.next_read = self.next_round = self.next_try = 0.0
        self.began = self.clock()
        self.deadline = self.began + own.timeout
        self.resolve_deadline = self.began + _MIN_WAIT_SECONDS

    def join(self) -> tuple[Roster, Any, Any, str]:
        """Find rank 0; return the roster, the answer for all and for this rank, and the nonce.

        Raises:
            RankMissingError: rank 0 cannot be found, or was lost.
            HpctrainError: the error that rank 0 sent.
        """
        next_status = self.began + STATUS_SECONDS
        try:
            while self.outcome is None:
                now = self.clock()
                hopeless = not self.attempts and self.names.wrong and now > self.resolve_deadline
                if now >= self.deadline or (self.server is None and hopeless):
                    raise self._not_found()
                wake = self.deadline
                if self.server is None:
                    wake = min(self._search(now), wake)
                    if now > next_status:
                        self.own.announce(
                            f"{self.own.noun} {self.own.world.rank} looks for {self.own.noun} 0: "
                            f"{self._describe_attempts()}"
                        )
                        next_status = now + STATUS_SECONDS
                self.connections.poll(wake - self.clock())
        finally:
            self.connections.close_all()
        if isinstance(self.outcome, HpctrainError):
            raise self.outcome
        return self.outcome

    def _search(self, now: float) -> float:
        """Try the next place if it is time for it, and return the time of the next step."""
        for place, attempt in list(self.attempts.items()):
            if attempt.began < now - _ATTEMPT_SECONDS:
                self._drop(place)
        if not self.places and now >= self.next_round:
            self.places.extend(self._next_places())
            # Many ranks may try many hosts.
            self.next_round = now + self.pause * max(1.0, len(self.places) / 128)
            self.pause = min(2 * self.pause, _PAUSES[1])
        while self.places and self._has_room(now) and now >= self.next_try:
            self._try(self.places.popleft())
        if not self.places:
            return self.next_round
        return self.next_try if self._has_room(now) else now + _HEAD_START_SECONDS

    def _next_places(self) -> list[Place]:
        """Return the places to try next: those in the store, then all hosts port by port."""
        if self.own.store is not None and self.clock() >= self.next_read:
            self._read_store()
        found = [address for _, address in self.names.resolve(self.hosts)]
        if found or self.own.store is not None:
            self.resolve_deadline = self.clock() + _MIN_WAIT_SECONDS
        ports = self.ports
        # Rank 0 nearly always gets the first port: try it in each round, and the others in turn
        # unless another program seems to hold it.
        all_ports = len(found) <= _FEW_ADDRESSES and (self.occupied or self.attempts)
        if len(ports) > 1 and not all_ports:
            ports = [ports[0], ports[1 + self.round % (len(ports) - 1)]]
        self.round += 1
        every = [*self.published, *((address, port) for port in ports for address in found)]
        return [place for place in dict.fromkeys(every) if place not in self.attempts]

    def _read_store(self) -> None:
        """Read rank 0's addresses from the key-value store."""
        assert self.own.store is not None
        value = decode(self.own.store.read(self.own.credentials.start) or b"")
        try:
            self.published = _published_places(value) if value else []
        except (KeyError, TypeError, ValueError):
            self.published = []  # a value of another program, or an incomplete one
        self.next_read = self.clock() + _STORE_SECONDS[bool(self.published)]

    def _try(self, place: Place) -> None:
        """Begin to connect to a place."""
        self.next_try = self.clock() + _HEAD_START_SECONDS
        try:
            self.attempts[place] = self.connections.connect(place, partial(self._converse, place))
        except OSError as error:
            self._note(place, error)

    def _note(self, place: Place, error: OSError) -> None:
        """Note how an attempt has ended, and let the next one begin."""
        self.attempts.pop(place, None)
        self.answers[place] = error.strerror or str(error)
        self.occupied |= error.errno != errno.ECONNREFUSED
        many = len(self.places) > 2 * _FEW_ADDRESSES
        self.next_try = self.clock() + (_BRAKE_SECONDS if many else 0.0)

    def _has_room(self, now: float) -> bool:
        """Check whether one more connection may begin; drop an old one that gets no answer.

        The dropped place is tried again in the next round.
        """
        if len(self.attempts) >= _ATTEMPTS:
            place, oldest = next(iter(self.attempts.items()))
            if now - oldest.began > _CROWDED_SECONDS:
                self._drop(place)
        return len(self.attempts) < _ATTEMPTS

    def _drop(self, place: Place) -> None:
        self.connections.close(self.attempts[place], OSError(errno.ETIMEDOUT, "no answer"))

    def _converse(self, place: Place, connection: Connection) -> Conversation:
        """Find out whether rank 0 is at a place; if so, join it."""
        try:
            challenge = yield from greet(self.connections, connection, self.own.credentials)
        except OSError as error:
            self._note(place, error)
            raise
        del self.attempts[place]
        self.server = connection
        for other in list(self.attempts.values()):
            self.connections.close(other)
        self.attempts.clear()
        # Rank 0 may wait so long for other ranks. Keep-alive ends the connection if it is lost.
        self.deadline = self.clock() + self.own.timeout + 2 * GRACE_SECONDS
        try:
            yield from self._join(connection, challenge)
        except OSError as error:
            reason = error.strerror or error
            self.lost_connection = f"{place[0]} answered, then was lost: {reason}"
            self.server, self.next_round = None, self.clock() + _HEAD_START_SECONDS
            # An earlier start may have answered just before its end. That is over soon.
            self.deadline = min(self.deadline, self.clock() + _MIN_WAIT_SECONDS)
            raise

    def _join(self, connection: Connection, challenge: str) -> Conversation:
        """Send this rank's entry, confirm the roster, and wait for the begin or an error."""
        proof = self.own.credentials.proof("client", challenge, self.own.hello)
        keep_alive(connection.socket)
        self.connections.send(connection, encode({"proof": proof, "hello": self.own.hello}))
        message, own = last, _ = yield from self._message(connection)
        if "roster" in message:
            self.connections.send(connection, encode({"received": self.own.world.rank}))
            last, _ = yield from self._message(connection)
        if "error" in last:
            wrong_use = last["exit_code"] == UsageError.exit_code
            kind = UsageError if wrong_use else StartError
            self.outcome = repeated(kind.__name__, *last["error"])
        else:
            self.outcome = *unpack(message["roster"]), json.loads(own), message["nonce"]

    def _message(self, connection: Connection) -> Generator[int, bytes, tuple[dict[str, Any], str]]:
        """Return a message of rank 0, and the value that it has for this rank alone.

        Raises:
            OSError: its proof is wrong.
        """
        head = decode((yield LONGEST_LINE))
        line = yield LONGEST_LINE
        own = str(head.get("own", ""))
        text = hashlib.sha256(line).hexdigest() + own
        challenges = connection.challenges
        if not self.own.credentials.proves(head.get("proof"), "message", challenges, text):
            raise OSError(errno.EBADMSG, "a message without a valid proof")
        return decode(line), own

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
        if self.own.store is not None and not self.published:
            parts.append(f"no address in {self.own.store.where}")
        return "; ".join(parts) or "no answer yet"

    def _not_found(self) -> RankMissingError:
        waited, noun = self.clock() - self.began, self.own.noun
        where = ", ".join(self.hosts[:8]) + (", …" if len(self.hosts) > 8 else "")
        return RankMissingError(
            "HT202",
            f"{noun} {self.own.world.rank} on {self.own.point.host} did not find {noun} 0"
            + (f" at {where}" if where else "")
            + f" within {waited:.0f} s ({self._describe_attempts()})",
            f"{noun} 0 listening there",
            f"look for the first error in the log of {noun} 0",
            f"if it is on another host or has another name: export {env_vars.MAIN_ADDRESS}=HOST",
        )


def _published_places(value: dict[str, Any]) -> list[Place]:
    """Return the addresses and ports that rank 0 has published.

    Raises:
        KeyError, TypeError, ValueError: the value has another format.
    """
    port = value["port"]
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(port)
    return [(str(ipaddress.ip_address(address)), port) for address in value["addresses"]]
