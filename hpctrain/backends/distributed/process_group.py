"""The default process group of torch.distributed: connection, collectives and errors of ranks."""

import ctypes
import datetime
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hpctrain.backends.base import Backend, Work, vector
from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.distributed.flight_recorder import FlightRecorder
from hpctrain.backends.distributed.store import absent, assemble, open_store
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.env_vars import GLOO_INTERFACE
from hpctrain.cluster.texts import first_line, ranks_text
from hpctrain.errors import HpctrainError, RankLostError, RankMissingError, StartError, UsageError
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.interfaces import interface_of

__all__ = ["ProcessGroup", "transport_of"]

T = TypeVar("T")


class ProcessGroup(Backend):
    """Base of the backends over torch.distributed: NCCL on GPUs, gloo on CPUs.

    The rendezvous connects its default process group. Subclasses prepare the models.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        if dist.is_initialized():
            raise UsageError("HT308.torch-initialized")
        self.device, self._rendezvous = device, rendezvous
        self.transport = transport_of(device)
        self._environment = Environment(os.environ)
        self._aside: Any = None  # process group of sums in the background, if it is its own
        world, own = rendezvous.world, rendezvous.roster.addresses[rendezvous.world.rank]
        limit_s = settings.start_timeout
        limits = [datetime.timedelta(seconds=seconds) for seconds in (limit_s, settings.timeout)]
        libraries, self._recorder = self._libraries(), None
        if "gloo" in libraries:
            # gloo reads the interface from the environment only. Its default is the address of the
            # host's own name: on many clusters 127.0.1.1.
            self._environment.default(GLOO_INTERFACE, interface_of(own))
        if "nccl" in libraries:
            self._recorder = FlightRecorder(self._environment, world.rank)
        try:
            store = open_store(rendezvous, limits[0])
            assemble(PrefixStore(f"{rendezvous.nonce}/here", store), rendezvous, limit_s)
            connected = PrefixStore(f"{rendezvous.nonce}/connected", store)
            try:
                dist.init_process_group(
                    libraries,
                    store=PrefixStore(rendezvous.nonce, store),
                    rank=world.rank,
                    world_size=world.world_size,
                    timeout=limits[0],
                    device_id=device if device.type == "cuda" else None,
                )
            except BaseException:
                absent(connected, world.rank)
                raise
            assemble(connected, rendezvous, limit_s)
            # When a rank is lost, a sum of gloo that fails may keep back the later messages of its
            # process group. So gradients do not share one with sums that nobody waits for yet.
            if self.transport == "gloo":
                self._aside = dist.new_group(timeout=limits[0])
            self._store, self._exchanges = PrefixStore(f"{rendezvous.nonce}/texts", store), 0
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if "gloo" in libraries and sys.version_info < (3, 12):
                self._keep_thread_states({None, self._aside})
            # Of each collective from now on. torch 2.15 renamed the function.
            change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self._aside):
                change(limits[1], group)
            store.set_timeout(limits[1])
        except StartError:
            self._put_back()
            raise
        except (RuntimeError, ValueError) as error:
            self._put_back()
            route, reason = f"{self.transport} from {own}", _named(error, rendezvous)
            nodes = ", ".join(world.hosts or ())
            raise RankMissingError(
                "HT306.torch", world=world, route=route, limit_s=limit_s, reason=reason, nodes=nodes
            ) from None

    def _libraries(self) -> str:
        """Return the libraries of the process group, as `init_process_group` takes them."""
        return self.transport

    def _keep_thread_states(self, groups: set[Any]) -> None:
        """Give the threads of gloo Python thread states for good, so that this process can fork.

        Without one, a thread makes and deletes a state whenever it releases a tensor of Python at
        the end of a collective. A process that is forked at this moment waits for a lock without
        end in Python 3.11, before its first line of Python.

        A thread gets its state in a callback. The ranks attach their callbacks before the source of
        a broadcast begins it, as a callback of a complete collective runs in another thread.

        Args:
            groups: process groups of gloo; None is the default one.
        """
        threads = 2 * len(os.environ.get(GLOO_INTERFACE, "").split(","))  # two for each interface
        for source in range(min(2, self.world_size)):
            ends: list[Any] = []
            if self.rank == source:
                self.all_gather_text("")  # all other ranks have attached their callbacks
            for group in groups:
                works: list[Any] = [
                    dist.broadcast(torch.empty(1), source, group, async_op=True)
                    for _ in range(threads)
                ]
                keep = partial(_keep_thread_state, threading.Barrier(threads))
                attached = [work.get_future().then(keep) for work in works if self.rank != source]
                ends += attached or works
            if self.rank != source:
                self.all_gather_text("")
            for end in ends:
                end.wait()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor with an all-reduce."""
        dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Take the maximum with an all-reduce."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather into views of one tensor."""
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather(list(gathered), tensor)
        return gathered

    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """Begin an all-reduce, without waiting for it; with gloo, in a process group of its own."""
        tensor = vector(numbers, self.device)
        return Work(tensor, dist.all_reduce(tensor, group=self._aside, async_op=True))

    def broadcast_object(self, thing: T, source: int = 0) -> T:
        """Broadcast the object of one rank."""
        box = [thing]
        dist.broadcast_object_list(box, src=source, device=self.device)
        return box[0]

    def gather_object(self, thing: T) -> list[T]:
        """Gather the pickled objects over the same group."""
        box: list[Any] = [None] * self.world_size
        dist.gather_object(thing, box if self.rank == 0 else None, dst=0)
        return box if self.rank == 0 else []

    def all_gather_text(self, text: str) -> list[str]:
        """Exchange the texts through rank 0, by messages with their own tag over gloo.

        NCCL's messages have no tags, so with it the texts go by the store. Collectives have no
        names: if one rank sums gradients and another one a loss, gloo confuses the two and ends
        the process. So the ranks first exchange here which operation they are about to do.
        """
        send, receive = (_send, _receive) if self.transport == "gloo" else self._by_store()
        if self.rank:
            send(json.dumps(text), 0)  # never empty
            texts: list[str] = json.loads(receive(0))
            return texts
        others = range(1, self.world_size)
        texts = [text, *(json.loads(receive(other)) for other in others)]
        for other in others:
            send(json.dumps(texts), other)
        return texts

    def _by_store(self) -> tuple[Callable[[str, int], None], Callable[[int], str]]:
        """Return functions that send a text to a rank and receive one, in the next exchange."""
        self._exchanges += 1
        store, number, rank = self._store, self._exchanges, self.rank

        def send(text: str, to: int) -> None:
            store.set(f"{number}/{rank}-{to}", text)

        def receive(other: int) -> str:
            text: str = store.get(f"{number}/{other}-{rank}").decode()
            if rank == 0:  # the other rank has called this, so older values are not read again
                store.delete_key(f"{number}/{other}-0")
                store.delete_key(f"{number - 1}/0-{other}")
            return text

        return send, receive

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Broadcast all tensors at the same time."""
        sent = [t.detach() for t in tensors if t.numel()]
        works = [dist.broadcast(t, src=source, async_op=True) for t in sent]
        for work in works:
            if work is not None:
                work.wait()

    def barrier(self) -> None:
        """Wait at torch.distributed's barrier."""
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def explain(self, error: BaseException) -> HpctrainError | None:
        """Return an error for a lost or unresponsive rank; else None."""
        if not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
            return None
        reason = _named(error, self._rendezvous)
        return RankLostError("HT309.connection-lost", rank=self.rank, reason=reason)

    def dump_to(self, folder: Path) -> tuple[str, str] | None:
        """Return how to ask torch's Flight Recorder for the collectives of NCCL."""
        return self._recorder.dump_to(folder) if self._recorder is not None else None

    def close(self, failure: str | None = None) -> None:
        """Destroy the process group and restore the environment."""
        if dist.is_initialized() and not (failure is not None and self.transport == "nccl"):
            # NCCL's communicators wait for the other ranks, which may be gone after a failure:
            # then the end of the process frees them.
            dist.destroy_process_group()
        self._put_back()

    def _put_back(self) -> None:
        """Restore the environment."""
        if self._recorder is not None:
            self._recorder.close()
        self._environment.put_back()


# Messages in gloo's pair.cc and unbound_buffer.cc, and in ProcessGroupNCCL.cpp, torch 2.15.
_LOST = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Timed out waiting|Application timeout"
    r"|NCCL (error|communicator)|remote process (exited|has terminated)",
    re.IGNORECASE,
)


_SECONDS_TO_MEET = 10.0


def _keep_thread_state(meeting: threading.Barrier, future: Any) -> None:
    """Keep the thread state of this thread; wait until each thread of the group is here."""
    ctypes.pythonapi.PyGILState_Ensure()  # without PyGILState_Release
    with suppress(threading.BrokenBarrierError):  # fewer threads than expected have all been here
        meeting.wait(_SECONDS_TO_MEET)


_TAG = 0x6870  # "hp"; gloo separates messages with tags from collectives


def _send(text: str, to: int) -> None:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(data)]), to, tag=_TAG)
    dist.send(data, to, tag=_TAG)


def _receive(other: int) -> str:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, other, tag=_TAG)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, other, tag=_TAG)
    return data.numpy().tobytes().decode()


def transport_of(device: torch.device) -> str:
    """Return the name of the library that carries the data of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def _named(error: Exception, rendezvous: Rendezvous) -> str:
    """Return torch's message, with the ranks and hosts of the addresses in it."""
    roster, text = rendezvous.roster, first_line(error)
    if len(set(roster.addresses)) == 1:
        return text
    for address in dict.fromkeys(roster.addresses):
        ranks = [rank for rank, other in enumerate(roster.addresses) if other == address]
        host = roster.host(ranks[0])
        if address in text and host not in text:
            text += f" ({address} is {host}, with {ranks_text(ranks)})"
    return text
