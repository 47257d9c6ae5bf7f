"""The backend over Horovod: its start, its collectives, and the report of lost ranks."""

import atexit
import ctypes
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.backends.base import Backend, Work, vector
from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.horovod import gradients, placement
from hpctrain.backends.horovod.horovod_import import (
    load,
    refuse_options,
    refuse_own_name,
    refuse_start,
)
from hpctrain.backends.horovod.liveness import Connections, Liveness, Wait
from hpctrain.backends.settings import BackendSettings
from hpctrain.backends.trained_parameters import TRAINED, Trained
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, RankMissingError, StartError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.http_store import HttpStore

__all__ = ["Horovod"]

T = TypeVar("T")
_MOST_LATER = 64
_TURNS = 3  # one is enough, unless the thread is faster than a line of Python
_SHUTDOWN_SECONDS = 5.0
_CHECK_SECONDS = 0.1  # interval of the check for lost ranks while Horovod connects
_TWICE = "more than backward_passes_per_step"  # in the error of a hook that is called again


class Horovod(Backend):
    """The backend over Horovod's global process set, under any launcher.

    Over gloo, rank 0 serves Horovod's rendezvous, and every rank gets its place from hpctrain's
    rendezvous. So srun, torchrun and `hpctrain run` work as well as horovodrun. Over MPI, the ranks
    are those of MPI.
    """

    name = "horovod"
    captures_stderr = True
    _mpi_was_used = False  # MPI can start only once in a process
    _abandoned: ClassVar[list[HttpStore]] = []

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        self._hvd = hvd = load()
        self._rendezvous, self._settings, self.device = rendezvous, settings, device
        world = rendezvous.world
        over = placement.controller(os.environ, world.launcher, hvd.mpi_built())
        on_gpu = device.type == "cuda" and hvd.nccl_built()
        self.transport = "nccl" if on_gpu else over
        if over == "mpi":
            self.mismatch = "HT303.rank-differs-over-mpi"
        if world.world_size > 1 and ":" in rendezvous.roster.addresses[0]:
            raise StartError("HT307.ipv6-address", address=rendezvous.roster.addresses[0])
        self.reduction = {"average": "mean"}.get(settings.own["op"], settings.own["op"])
        self._environment = Environment(os.environ)
        self._trained: list[Trained] = []
        self._gradients: list[gradients.HorovodGradients] = []
        self._sends = True  # whether backward passes send gradients
        self._passed = False  # whether a backward pass began since the last averaging
        self._compressor = gradients.compression(hvd, settings.own["compression"])
        self._later = 0
        self._wait = Wait()
        self._connections = Connections()
        self._store: HttpStore | None = None
        self._liveness: Liveness | None = None
        try:
            port = self._assemble() if world.world_size > 1 else None
            placement.set_variables(self._environment, over, rendezvous, settings, port)
            # MPI handles its own connections, and ends all ranks when one fails.
            with self._connections if over == "gloo" else nullcontext():
                self._start(over)
            if sys.version_info < (3, 12):
                self._keep_thread_state()
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        self.rank, self.world_size = hvd.rank(), hvd.size()
        if settings.deterministic and settings.own["groups"] is None:
            logger.info(
                "deterministic: Horovod sends each gradient by itself, which takes longer for many "
                "small ones; where every parameter has a gradient in every step, "
                "--horovod groups=1 is bit-equal too"
            )

    @classmethod
    def check(cls, world: World, device: torch.device, settings: BackendSettings) -> None:
        """Check whether Horovod is installed and supports the options."""
        hvd = load()
        over = placement.controller(os.environ, world.launcher, hvd.mpi_built())
        refuse_start(hvd, world, over, cls._mpi_was_used)
        if over == "gloo":
            refuse_own_name(world, os.environ)
        refuse_options(settings, over, world)

    def _assemble(self) -> int:
        """Connect the liveness of all ranks; return the port of Horovod's store on rank 0."""
        rendezvous = self._rendezvous
        if rendezvous.world.rank == 0:
            listener = socket.create_server((rendezvous.roster.addresses[0], 0), backlog=4096)
            listener.setblocking(False)
            self._store = HttpStore(listener)
        cut = self._connections.cut
        self._liveness = Liveness(rendezvous, self._settings, self._wait, cut, self._store)
        return self._liveness.assemble()

    def _start(self, over: str) -> None:
        """Run hvd.init() in a thread, as it waits without end for missing ranks.

        Raises:
            RankMissingError: it does not finish in time.
            RankLostError: another rank was lost or failed before the end.
        """
        limit, failed = self._settings.start_timeout, []

        def start() -> None:
            try:
                self._hvd.init()
            except Exception as error:  # reported by the waiting thread
                failed.append(error)

        thread = threading.Thread(target=start, name="hvd.init", daemon=True)
        Horovod._mpi_was_used |= over == "mpi"
        thread.start()
        end, liveness = time.monotonic() + limit, self._liveness
        while thread.is_alive() and time.monotonic() < end:
            thread.join(_CHECK_SECONDS)
            if liveness is not None and liveness.known:
                break
        if not thread.is_alive() and not failed:
            return
        self._skip_shutdown()
        if liveness is not None and liveness.known and (lost := liveness.find_error()):
            raise lost
        world = self._rendezvous.world
        nodes = ", ".join(world.hosts or ())
        if failed:
            raise RankMissingError(
                "HT306.horovod-failed", world=world, transport=over, reason=failed[0], nodes=nodes
            )
        raise RankMissingError(
            "HT306.horovod-timeout", world=world, transport=over, limit_s=limit, nodes=nodes
        )

    def _keep_thread_state(self) -> None:
        """Give Horovod's thread a Python thread state for good, so that this process can fork.

        The reason is that of `ProcessGroup._keep_thread_states`: this thread makes a state to
        release each tensor of Python. It runs no callback, but calls the finalizer of a tensor to
        which it has the last reference.
        """
        for turn in range(_TURNS):
            tensor = torch.empty(1)
            finalizer = weakref.finalize(tensor, ctypes.pythonapi.PyGILState_Ensure)
            finalizer.atexit = False
            handle = self._hvd.allreduce_async_(tensor, name=f"keep.{turn}", op=self._hvd.Sum)
            self._hvd.mpi_ops._handle_map[handle] = (None, None)
            del tensor
            with self._wait("the other ranks"):
                self._hvd.synchronize(handle)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself, with rank 0's weights and hooks that average gradients.

        Raises:
            UsageError: Horovod cannot average the type of a weight, or two models share weights.
        """
        if any(averager.has(p) for p in model.parameters() for averager in self._gradients):
            raise UsageError("HT317.shared-parameters")
        self.broadcast([*model.parameters(), *model.buffers()])
        self._trained.append(Trained(model))
        self._hook([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        return model

    def _hook(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Let Horovod average the gradients of parameters, which are given with their names."""
        own = self._settings.own
        if own["op"] != "adasum" and parameters:
            name = f"model{len(self._gradients)}"
            averager = gradients.HorovodGradients(self._hvd, parameters, name, own)
            averager.send(self._sends)
            self._gradients.append(averager)

    def attach(self, loss: Tensor) -> Tensor:
        """Add hooks to parameters that were unfrozen."""
        self._passed = True
        for trained in self._trained:
            flags = list(map(TRAINED, trained.parameters))
            if flags != trained.flags and any(flags):
                # Parameters that were frozen for a while still have their hooks.
                self._hook(
                    [
                        (name, parameter)
                        for name, parameter in trained.refresh()
                        if not any(averager.has(parameter) for averager in self._gradients)
                    ]
                )
        return loss

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Let the hooks of all models send gradients, or hold them back."""
        self._sends = wanted
        for averager in self._gradients:
            averager.send(wanted)

    def forget(self) -> None:
        """Drop what the hooks hold back."""
        self._passed = False
        for averager in self._gradients:
            averager.forget()

    def sync_gradients(self) -> None:
        """Wait for the sums that the backward pass began."""
        # A loss may reach a model on some ranks only, and each of them has to take part. A backward
        # pass that the session does not see leaves only its gradients.
        passed, self._passed = self._passed, False
        begun = passed or any(averager.pending() for averager in self._gradients)
        if begun and self._gradients and self.world_size > 1:
            with self._wait("gradients"):
                gradients.average(self._hvd, self._gradients, held=not passed)

    def update(self, optimizer: Optimizer, step: Callable[[Optimizer], None]) -> None:
        """Take the optimizer step; with Adasum, combine the steps of all ranks."""
        if self._settings.own["op"] == "adasum" and self.world_size > 1:
            with self._wait("updates"):
                gradients.combine_updates(self._hvd, optimizer, step, self._compressor)
        else:
            step(optimizer)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor with an all-reduce."""
        with self._wait("a sum"):
            self._hvd.allreduce_(tensor, name="sum", op=self._hvd.Sum)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Take the maximum with an all-reduce."""
        with self._wait("a maximum"):
            self._hvd.allreduce_(tensor, name="max", op=self._hvd.Max)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather along a new dimension."""
        # Horovod's thread is in no inference mode, and resizes the tensors for its results.
        with torch.inference_mode(False), self._wait("tensors of all ranks"):
            gathered: Tensor = self._hvd.allgather(tensor[None], name="all_gather")
        return gathered

    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """Begin an all-reduce without waiting for it; on a GPU, wait until Horovod is done."""
        tensor = vector(numbers, self.device)
        # Horovod caches data by name, and rejects a name that is still in use.
        self._later = (self._later + 1) % _MOST_LATER
        name = f"sum_async.{self._later}"
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)
        return Work(tensor, _Work(self._hvd, handle, self._wait))

    def broadcast_object(self, thing: T, source: int = 0) -> T:
        """Broadcast the object of one rank."""
        # Without a name Horovod uses that of the object's class, which may differ by rank.
        with self._wait(f"an object of rank {source}"):
            shared: T = self._hvd.broadcast_object(thing, source, name="share")
        return shared

    def gather_object(self, thing: T) -> list[T]:
        """Gather with an all-gather of pickles, as Horovod has no gather."""
        with torch.inference_mode(False), self._wait("the states of all ranks"):
            things: list[T] = self._hvd.allgather_object(thing, name="gather")
        return things if self.rank == 0 else []

    def all_gather_text(self, text: str) -> list[str]:
        """Exchange the texts with an all-gather, which its name separates from others."""
        with torch.inference_mode(False), self._wait("the other ranks"):
            return list(self._hvd.allgather_object(text, name="text"))

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Broadcast all tensors at the same time, as bytes."""
        with self._wait(f"weights or buffers of rank {source}"):
            gradients.broadcast(self._hvd, tensors, source)

    def barrier(self) -> None:
        """Wait at Horovod's barrier."""
        with self._wait("a barrier"):
            self._hvd.barrier()

    def explain(self, error: BaseException) -> HpctrainError | None:
        """Return an error that names lost or failed ranks, or the cause of an error of Horovod.

        Return None if no rank is lost or has failed. Then the error is the same on all ranks, and
        Horovod's message describes it.
        """
        if isinstance(error, AssertionError) and _TWICE in str(error):
            return UsageError("HT312.gradient-twice")
        internal = self._hvd.mpi_ops.HorovodInternalError
        if self._liveness is None or not isinstance(error, internal):
            return None
        return self._liveness.find_error()

    def close(self, failure: str | None = None) -> None:
        """Shut Horovod down and restore the environment.

        After a failure the shutdown has a time limit. A sum of Horovod's own that begins when the
        other ranks are gone never ends, and the shutdown waits for it until gloo's time-out.
        """
        if failure is None:
            self._hvd.shutdown()
        else:
            if self._liveness is not None:
                self._liveness.report(failure)
            shutdown = self._hvd.mpi_ops._basics.shutdown
            thread = threading.Thread(target=shutdown, name="hvd.shutdown", daemon=True)
            thread.start()
            thread.join(_SHUTDOWN_SECONDS)
            if thread.is_alive():
                logger.warning("Horovod does not shut down: this process ends without its shutdown")
                self._skip_shutdown()
        self._environment.put_back()
        if self._liveness is not None:
            self._liveness.leave(normally=failure is None)
        if self._store is not None:
            self._store.server_close()

    def _skip_shutdown(self) -> None:
        """Let this process end without Horovod's shutdown and its destructor, which would wait."""
        atexit.unregister(self._hvd.mpi_ops._basics.shutdown)
        atexit.register(_exit_process)

    def _give_up(self, failure: str) -> None:
        """Report to the other ranks that Horovod did not start on this one."""
        self._environment.put_back()
        if self._liveness is not None:
            self._liveness.report(failure)
            self._liveness.leave(normally=False)
        if self._store is not None:
            # A thread of Horovod that still looks for other ranks would abort the process if
            # nothing listened there.
            Horovod._abandoned.append(self._store)


def _exit_process() -> None:
    """End a failed process without the destructors of its libraries."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class _Work:
    """A handle of Horovod with the methods of torch.distributed's works."""

    def __init__(self, hvd: ModuleType, handle: int, wait: Wait) -> None:
        self._hvd, self._handle, self._wait = hvd, handle, wait

    def is_completed(self) -> bool:
        """Check whether `wait` returns at once."""
        return bool(self._hvd.poll(self._handle))

    def wait(self) -> None:
        """Wait until the sum is done."""
        with self._wait("sums of metrics"):
            self._hvd.synchronize(self._handle)
