"""Links between hosts that each have an `hpctrain run` of their own; they show a lost host.

Slurm waits `SlurmdTimeout` (300 s by default) before it says that a host is down, and NCCL or gloo
wait for their own time-out. So each host keeps a link (`agent_links`) to the first one:

    host → first host   {"index": INDEX}    the first message: who connects
    first host → host   {"lost": INDEX}     a host is lost
    both                {"bye": true}       the ranks of this host have ended

Without `bye`, the end of a link is a lost host, too: its launcher is gone, and so are its ranks.
"""

import queue
import time
from collections.abc import Callable

from hpctrain.errors import StartError
from hpctrain.launch.agent_links import AgentLinks, Link, Message, Received, connect
from hpctrain.rendezvous import Rendezvous

__all__ = ["HostWatch"]

_SECONDS_TO_CONNECT = 10
# When a whole start is ended, the hosts end one after the other.
_SECONDS_TO_EXPLAIN = 1.5
_SECONDS_TO_ARRIVE = 0.1


class HostWatch:
    """This host's part in the search for lost hosts.

    Args:
        met: rendezvous of the hosts, each of which counts as one rank. Its listener is closed at
            the end.
        secret: secret of the launch, or an empty string. Without one, the nonce of the rendezvous
            proves who belongs to it: who can read the network reads that, too.
        on_loss: function to call once, when a host is lost.

    Attributes:
        lost: name of a lost host; empty if there is none.
    """

    def __init__(self, met: Rendezvous, secret: str, on_loss: Callable[[], None]) -> None:
        self.lost = ""
        self._met, self._on_loss = met, on_loss
        self._inbox: queue.SimpleQueue[Received] = queue.SimpleQueue()
        # When links ended without `bye`, or those end that are not yet there.
        self._ended: dict[int, float] = {}
        self._links: dict[Link, int] = {}
        self._server: AgentLinks | None = None
        launch, secret = met.nonce, secret or met.nonce
        if met.listener is not None:
            self._server = AgentLinks(launch, secret, met.listener, self._inbox.put)
            # A host that has waited may have been lost meanwhile.
            others = range(1, met.world.world_size)
            self._ended = dict.fromkeys(others, time.monotonic() + _SECONDS_TO_CONNECT)
            return
        place = met.roster.addresses[0], met.roster.port
        hello = {"index": met.world.rank}
        try:
            link = connect([place], launch, secret, lambda _: hello, _SECONDS_TO_CONNECT)
        except StartError:
            self._ended[0] = time.monotonic()
            return
        self._links[link] = 0
        link.follow(self._inbox.put)

    def look(self) -> None:
        """Handle what has arrived; to be called often."""
        while not (self.lost or self._inbox.empty()):
            self._handle(*self._inbox.get())
        for index, since in self._ended.items():
            if not self.lost and time.monotonic() > since + _SECONDS_TO_EXPLAIN:
                self._lose(index)

    def close(self) -> None:
        """Tell the others that the ranks of this host have ended, and end the links."""
        time.sleep(_SECONDS_TO_ARRIVE)  # the end of a host whose loss has ended the ranks here
        self.look()
        while self._ended and not self.lost:
            time.sleep(_SECONDS_TO_EXPLAIN / 10)
            self.look()
        for link in self._links:
            link.send(bye=True)
            link.end()
        if self._server is not None:
            self._server.close()

    def _handle(self, link: Link, message: Message | None) -> None:
        index = self._links.get(link)
        if message is None:
            if index is not None:
                del self._links[link]
                self._ended[index] = time.monotonic()
        elif index is None:
            self._links[link] = message["index"]
            self._ended.pop(message["index"], None)
        elif "lost" in message:
            self._lose(message["lost"])
        elif "bye" in message:
            del self._links[link]

    def _lose(self, index: int) -> None:
        self.lost = self._met.roster.hosts[index]
        if self._server is not None:
            for link in self._links:
                link.send(lost=index)
        self._on_loss()
