"""Rank 0's part in the liveness of the ranks: it has all connections, and finds the cause."""

import asyncio
import json
import math
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.rendezvous.connections import Connection, serve, until
from hpctrain.rendezvous.messages import encode, keep_alive

__all__ = ["SHOWN", "Findings", "Hub"]

_LONGEST_LINE = 1 << 20
SHOWN = 8  # maximum number of failed or waiting ranks in a message
_SETTLE_SECONDS = 0.5  # from the first known failure to the findings
_REPORT_SECONDS = 3.0  # for ranks to report that they wait, if no failure is known


@dataclass(frozen=True, slots=True)
class Findings:
    """The cause of a failure, as rank 0 has found it.

    Attributes:
        lost: ranks whose process is gone.
        unresponsive: ranks that keep the others waiting.
        failed: pairs of a rank and what failed there.
        waits: pairs of a rank and what it waits for, if nothing else is known.
    """

    lost: list[int] = field(default_factory=list)
    unresponsive: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    waits: list[tuple[int, str]] = field(default_factory=list)


class Hub:
    """The server of all ranks.

    Args:
        size: number of ranks.
        port: port of Horovod's store.
    """

    def __init__(self, size: int, port: int) -> None:
        self._everyone, self._port = set(range(size)), port
        self._present: dict[int, Connection] = {}
        self._reports: dict[int, tuple[str, str]] = {}
        self._gone: set[int] = set()
        self._unresponsive: set[int] = set()
        self._answer = b""  # for ranks that connect late
        self._changed = asyncio.Event()

    def start(self, listener: socket.socket, start_timeout: float) -> None:
        """Serve the ranks until the event loop ends."""
        serving, judging = serve(listener, self._serve, _LONGEST_LINE), self._judge(start_timeout)
        self._tasks = [asyncio.create_task(serving), asyncio.create_task(judging)]

    async def _judge(self, start_timeout: float) -> None:
        """Tell the ranks the port when all have connected, and the cause of a failure."""
        await until(self._changed, lambda: self._trouble() or not self._absent(), start_timeout)
        if not self._trouble():
            missing = self._absent()
            self._send("missing", missing) if missing else self._send("port", self._port)
        await until(self._changed, self._trouble, math.inf)
        self._send("report")
        found = await self._find_cause()
        self._unresponsive = set(found.unresponsive)
        self._send("cause", asdict(found))

    async def leave(self, seconds: float) -> None:
        """Wait until the other ranks have left or have the findings, for a limited time."""
        await until(self._changed, lambda: self._present.keys() <= self._unresponsive, seconds)

    async def _serve(self, peer: Connection) -> None:
        """Receive the messages of a rank, and note when it is gone."""
        rank, left = -1, False
        keep_alive(peer.socket)
        try:
            while not left:
                match json.loads(await peer.read()):
                    case ["rank", int(number)] if rank < 0 and number in self._absent():
                        rank = number
                        self._present[rank] = peer
                        peer.send(self._answer)
                    case ["end", str(reason), str(wait)] if rank >= 0:
                        self._reports[rank] = (reason, wait)
                    case ["left"]:
                        left = True
                self._changed.set()
        except (ValueError, RecursionError):
            return  # an unknown peer
        finally:
            if self._present.pop(rank, None) and not left:
                self._gone.add(rank)
            self._changed.set()

    def _send(self, *words: Any) -> None:
        self._answer = encode(words)
        for peer in self._present.values():
            peer.send(self._answer)

    def _absent(self) -> list[int]:
        return sorted(self._everyone - self._present.keys())

    def _trouble(self) -> bool:
        return bool(self._gone or self._reports)

    async def _find_cause(self) -> Findings:
        """Find the cause of a failure, after some time in which ranks may report."""

        def known() -> bool:
            return self._everyone <= self._reports.keys() | self._gone

        def failed() -> list[tuple[int, str]]:
            return sorted((rank, reason) for rank, (reason, _) in self._reports.items() if reason)

        await until(self._changed, lambda: known() or self._gone or failed(), _REPORT_SECONDS)
        if self._gone or failed():
            await until(self._changed, known, _SETTLE_SECONDS)
        lost = sorted(self._gone - dict(failed()).keys())
        if lost or failed():
            return Findings(lost, failed=failed()[:SHOWN])
        if unresponsive := sorted(self._everyone - self._reports.keys()):
            return Findings(unresponsive=unresponsive)
        waits = ((rank, wait) for rank, (_, wait) in self._reports.items() if wait)
        return Findings(waits=sorted(waits))
