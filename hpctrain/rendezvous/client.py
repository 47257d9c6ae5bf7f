"""The client side of the rendezvous, on ranks above 0: find rank 0 and wait for the roster."""

import asyncio
import hashlib
import ipaddress
import itertools
import json
import os
from typing import Any

from hpctrain.cluster.texts import listed
from hpctrain.errors import RankMissingError, StartError, UsageError, repeated
from hpctrain.rendezvous.addresses import Names, candidate_hosts, ports
from hpctrain.rendezvous.connections import Connection, greet
from hpctrain.rendezvous.messages import (
    GRACE_SECONDS,
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
_ATTEMPTS = 64
_ATTEMPT_SECONDS = 10.0
# Time for a connection before the next one is tried in parallel ("Happy Eyeballs", RFC 8305).
_HEAD_START_SECONDS = 0.05
_PAUSES = (0.001, 0.5)  # between two rounds of all places: first and longest pause
# Minimum wait even if no name resolves: name servers fail under the queries of a large start.
_MIN_WAIT_SECONDS = 10.0

Place = tuple[str, int]
Found = asyncio.Future[tuple[Place, Connection, str]]


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
        self.answers: dict[Place, str] = {}  # result of the last attempt at each place
        self.lost_connection = ""  # how the last connection to rank 0 was lost
        self.published: list[Place] = []
        self.began = self.clock()

    async def join(self) -> tuple[Roster, Any, Any, str]:
        """Find rank 0; return the roster, the answer for all and for this rank, and the nonce.

        Raises:
            RankMissingError: rank 0 cannot be found, or was lost.
            HpctrainError: the error that rank 0 sent.
        """
        deadline = self.began + self.own.timeout
        while True:
            place, connection, challenge = await self._find(deadline)
            # Rank 0 may wait so long for others. Keep-alive ends the connection if it is lost.
            patience = self.own.timeout + 2 * GRACE_SECONDS
            latest = self.clock() + patience
            try:
                async with asyncio.timeout(patience):
                    return await self._join(connection, challenge)
            except OSError as error:
                self.lost_connection = (
                    f"{place[0]} answered, then was lost: {_reason(error) or 'no answer'}"
                )
                # An earlier start may have answered just before its end. That is over soon.
                deadline = min(latest, self.clock() + _MIN_WAIT_SECONDS)
                await asyncio.sleep(_HEAD_START_SECONDS)
            finally:
                connection.close()

    async def _find(self, deadline: float) -> tuple[Place, Connection, str]:
        """Return the first place at which rank 0 answers, the connection and its challenge."""
        found: Found = asyncio.get_running_loop().create_future()
        search = asyncio.create_task(self._search(found))
        try:
            while not search.done() and (left := deadline - self.clock()) > 0:
                patience = min(left, STATUS_SECONDS)
                await asyncio.wait((found, search), timeout=patience, return_when="FIRST_COMPLETED")
                if found.done():
                    return found.result()
                self.own.announce(
                    f"{self.own.noun} {self.own.world.rank} looks for {self.own.noun} 0: "
                    f"{self._describe_attempts()}"
                )
        finally:
            search.cancel()
        raise self._not_found()

    async def _search(self, found: Found) -> None:
        """Try all places again and again; return early if no name has an address."""
        room, pause, known = asyncio.Semaphore(_ATTEMPTS), _PAUSES[0], self.clock()
        under_way: set[Place] = set()

        async def attempt(place: Place) -> None:
            try:
                async with asyncio.timeout(_ATTEMPT_SECONDS):
                    connection, challenge = await greet(place, self.own.credentials)
                if found.done():
                    connection.close()
                else:
                    found.set_result((place, connection, challenge))
            except OSError as error:
                self.answers[place] = _reason(error) or self.answers[place]
            finally:
                under_way.discard(place)
                room.release()

        async with asyncio.TaskGroup() as attempts:
            for number in itertools.count():
                places = self._next_places(number)
                if places:
                    known = self.clock()
                elif self.own.store is None and self.clock() > known + _MIN_WAIT_SECONDS:
                    break
                for place in places:
                    if place not in under_way:
                        await room.acquire()
                        under_way.add(place)
                        self.answers.setdefault(place, "no answer yet")
                        task = attempts.create_task(attempt(place))
                        await asyncio.wait((task,), timeout=_HEAD_START_SECONDS)
                # Many ranks may try many hosts.
                await asyncio.sleep(pause * max(1.0, len(places) / 128))
                pause = min(2 * pause, _PAUSES[1])

    def _next_places(self, number: int) -> list[Place]:
        """Return the places of a round: those in the store, then all hosts port by port."""
        if self.own.store is not None:
            value = decode(self.own.store.read(self.own.credentials.start) or b"")
            self.published = _published_places(value)
        found = [address for _, address in self.names.resolve(self.hosts)]
        # Rank 0 nearly always gets the first port, or the second if the first is given and taken.
        first, rest = self.ports[:2], self.ports[2:]
        likely = [*first, rest[number % len(rest)]] if rest else first
        return [*self.published, *((address, port) for port in likely for address in found)]

    async def _join(self, connection: Connection, challenge: str) -> tuple[Roster, Any, Any, str]:
        """Send this rank's entry, and wait for the roster or an error."""
        proof = self.own.credentials.proof("client", challenge, self.own.hello)
        keep_alive(connection.socket)
        connection.send(encode({"proof": proof, "hello": self.own.hello}))
        message, own = await self._message(connection)
        if "error" in message:
            wrong_use = message["exit_code"] == UsageError.exit_code
            kind = UsageError if wrong_use else StartError
            raise repeated(kind.__name__, *message["error"])
        return *unpack(message["roster"]), json.loads(own), message["nonce"]

    async def _message(self, connection: Connection) -> tuple[dict[str, Any], str]:
        """Return a message of rank 0, and the value that it has for this rank alone.

        Raises:
            OSError: its proof is wrong.
        """
        head = decode(await connection.read())
        line = await connection.read()
        own = str(head.get("own", ""))
        text = hashlib.sha256(line).hexdigest() + own
        challenges = connection.challenges
        if not self.own.credentials.proves(head.get("proof"), "message", challenges, text):
            raise OSError("a message without a valid proof")
        return decode(line), own

    def _describe_attempts(self) -> str:
        """Describe the result of the last attempt at each address."""
        ports_by_answer: dict[tuple[str, str], list[str]] = {}
        for (address, port), answer in self.answers.items():
            ports_by_answer.setdefault((address, answer), []).append(str(port))
        names = {address: name for name, address in self.names.resolve(self.hosts)}
        parts = [text for text in (self.lost_connection, *self.names.wrong.values()) if text]
        for (address, answer), at in list(ports_by_answer.items())[:8]:
            name = names.get(address, address)
            where = f"{name} = " if name != address else ""
            more = ", …" if len(at) > 3 else ""
            parts.append(
                f"{where}{address}: {answer} (port{'s' * (len(at) > 1)} {', '.join(at[:3])}{more})"
            )
        if self.own.store is not None and not self.published:
            parts.append(f"no address in {self.own.store.where}")
        return "; ".join(parts) or "no answer yet"

    def _not_found(self) -> RankMissingError:
        waited_s, attempts = self.clock() - self.began, self._describe_attempts()
        hosts = listed(self.hosts) or "any address"
        return RankMissingError(
            "HT202.not-found", own=self.own, hosts=hosts, waited_s=waited_s, attempts=attempts
        )


def _published_places(value: dict[str, Any]) -> list[Place]:
    """Return the addresses and ports that rank 0 has published; none if the value is no such."""
    try:
        port = value["port"]
        if type(port) is not int or not 0 < port < 1 << 16:
            return []
        return [(str(ipaddress.ip_address(address)), port) for address in value["addresses"]]
    except (KeyError, TypeError, ValueError):
        return []


def _reason(error: OSError) -> str:
    """Return the reason of a failed connection, to which asyncio adds the address; "" for none."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
