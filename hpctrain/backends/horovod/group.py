"""The ranks under Horovod: who they are, what they sum, and who of them is lost."""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.backends.barrier import assemble
from hpctrain.backends.base import Backend, Work, vector
from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.horovod import gradients, placement
from hpctrain.backends.horovod.baseline import HorovodBaseline
from hpctrain.backends.horovod.connections import Connections
from hpctrain.backends.horovod.installed import load, refuse_options, refuse_own_name
from hpctrain.backends.horovod.rendezvous import Client, Server
from hpctrain.backends.horovod.stall_timer import Watch
from hpctrain.backends.horovod.survivors import Survivors
from hpctrain.backends.settings import Settings
from hpctrain.backends.trained_parameters import Trained
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, StartError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Rendezvous

__all__ = ["Horovod"]

T = TypeVar("T")
_MOST_LATER = 64
_SHUTDOWN_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # while Horovod connects the ranks: for one that is lost


class Horovod(Backend):
    """Horovod's global process set, whoever started the ranks.

    Over gloo rank 0 serves the rendezvous and every rank is told its place by the rendezvous, so
    srun, torchrun and `hpctrain run` do as well as horovodrun. Over MPI the ranks are MPI's.
    """

    name = "horovod"
    captures_stderr = True
    _mpi_was_used = False  # which starts once in a process
    _abandoned: ClassVar[list[Server]] = []

    def __init__(self, rendezvous: Rendezvous, device: torch.device, settings: Settings) -> None:
        self._hvd = hvd = load()
        self._rendezvous, self._settings, self.device = rendezvous, settings, device
        world = rendezvous.world
        over = placement.controller(os.environ, world.launcher, hvd.mpi_built())
        on_gpu = device.type == "cuda" and hvd.nccl_built()
        self.transport = "nccl" if on_gpu else over
        self.mismatch_hint = _HINTS[over]
        if world.world_size > 1 and ":" in rendezvous.roster.addresses[0]:
            raise StartError(
                f"rank 0 is at {rendezvous.roster.addresses[0]}: Horovod takes IPv4 alone",
                "an interface with an IPv4 address",
                "export HPCTRAIN_INTERFACE=NAME    or --backend ddp",
            )
        self._environment = Environment(os.environ)
        self._server = Server(rendezvous.listener) if rendezvous.listener is not None else None
        self._trained: list[Trained] = []
        self._gradients: list[gradients.Gradients] = []
        self._compressor = gradients.compression(hvd, settings.own["compression"])
        self._later = 0
        self._told = False  # whether the others know what went wrong
        self._survivors: Survivors | None = None
        self._connections = Connections(but=rendezvous.roster.port)
        self._watch = Watch(settings.timeout, self._complain)
        try:
            if world.world_size > 1:
                store = Client(rendezvous.roster.addresses[0], rendezvous.roster.port, "start")
                assemble(store, rendezvous, settings.start_timeout)
                self._survivors = Survivors(
                    rendezvous, self._server, self._watch.waiting, self._connections.cut
                )
            placement.tell(self._environment, over, rendezvous, settings)
            # MPI looks after its own, and ends all ranks with one.
            with self._connections if over == "gloo" else nullcontext():
                self._start(over)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        self.rank, self.world_size = hvd.rank(), hvd.size()
        if settings.deterministic and settings.own["groups"] is None:
            logger.info(
                "deterministic: Horovod sends each gradient by itself, which takes longer for many "
                "small ones; where every parameter has a gradient in every step, --horovod-groups "
                "1 is bit-equal too"
            )

    @classmethod
    def check(cls, world: World, device: torch.device, settings: Settings) -> None:
        """Look for Horovod, and hold the options to what it can do."""
        hvd = load()
        if hvd.is_initialized():
            raise UsageError(
                "Horovod is initialized already",
                "that the Session does it",
                "remove the script's own hvd.init(), or close the Session before",
            )
        refuse_options(hvd, settings.own, world.world_size)
        over = placement.controller(os.environ, world.launcher, hvd.mpi_built())
        if over == "mpi":
            if not hvd.mpi_built():
                raise UsageError(
                    "HOROVOD_CONTROLLER=mpi, and the installed Horovod was built without MPI",
                    "gloo, which needs nothing, or a Horovod with MPI",
                    "unset HOROVOD_CONTROLLER    or: hpctrain horovod build --mpi",
                )
            if cls._mpi_was_used:
                raise UsageError(
                    "a second Session over Horovod and MPI in one process",
                    "one, as MPI starts once in a process",
                    "export HOROVOD_CONTROLLER=gloo",
                )
        elif not hvd.gloo_built():
            raise UsageError(
                f"--backend horovod under {world.launcher}, and the installed Horovod was built "
                "without gloo",
                "gloo, or a start by mpirun",
                "hpctrain horovod build",
            )
        else:
            refuse_own_name(world, os.environ)
        if settings.own["op"] != "adasum":
            return
        if settings.loss_scaled:
            raise UsageError(
                "--horovod-op adasum with --precision fp16",
                "a precision without a loss scale: each rank takes its step before the updates are "
                "combined, and those of an overflow must not be",
                "--precision bf16",
            )
        if over != "mpi" and world.world_size > 1:
            raise UsageError(
                f"--horovod-op adasum over gloo, under {world.launcher}",
                "MPI, without which Horovod has no Adasum",
                "mpirun -np N python SCRIPT, with hpctrain horovod build --mpi; or --horovod-op "
                "average",
            )

    def _start(self, over: str) -> None:
        """hvd.init() in a thread, as it waits without end for what does not come.

        Raises:
            StartError: it is not through in time.
        """
        limit, failed = self._settings.start_timeout, []

        def start() -> None:
            try:
                self._hvd.init()
            except Exception as error:  # told by the thread that waits
                failed.append(error)

        thread = threading.Thread(target=start, name="hvd.init", daemon=True)
        Horovod._mpi_was_used |= over == "mpi"
        thread.start()
        end, others = time.monotonic() + limit, self._survivors
        while thread.is_alive() and time.monotonic() < end:
            thread.join(_LOOK_SECONDS)
            if others is not None and others.known:
                break
        if thread.is_alive() or failed:
            lost = others.ask() if others is not None and others.known else None
            if lost is not None:
                raise lost
            # At the end of the process it would wait for its own start.
            atexit.unregister(self._hvd.mpi_ops._basics.shutdown)
            world = self._rendezvous.world
            raise StartError(
                f"Horovod did not connect rank {world.rank} over {over} within {limit:.0f} s"
                + (f": {failed[0]}" if failed else ""),
                "a connection between all ranks",
                f"hosts of the ranks: {', '.join(world.hosts or ())}; look for a host that cannot "
                "be reached, a firewall or a wrong interface (HPCTRAIN_INTERFACE=NAME); "
                "HOROVOD_LOG_LEVEL=debug tells more",
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, with rank 0's weights; hooks on its parameters average gradients.

        Raises:
            UsageError: weights of a type that Horovod cannot average, or of two models.
        """
        if any(one.has(p) for p in model.parameters() for one in self._gradients):
            raise UsageError(
                "two prepared models share parameters, whose gradients would be averaged twice",
                "each parameter in one model",
                "session.prepare() for one module that has both",
            )
        self.broadcast([*model.parameters(), *model.buffers()])
        self._trained.append(Trained(model))
        self._hook([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        return model

    def _hook(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Let Horovod average the gradients of parameters, given with their names."""
        own = self._settings.own
        if own["op"] != "adasum" and parameters:
            name = f"model{len(self._gradients)}"
            self._gradients.append(
                gradients.Gradients(self._hvd, parameters, name, self._settings.accumulate, own)
            )

    def attach(self, loss: Tensor, first: bool) -> Tensor:
        """Hooks for what was unfrozen.

        Raises:
            UsageError: something was frozen or unfrozen inside of a step.
        """
        for trained in self._trained:
            if trained.changed():
                if not first:
                    raise UsageError(
                        "parameters were frozen or unfrozen between the micro-batches of a step, "
                        "which Horovod's hooks count",
                        "the same parameters to train in all micro-batches of a step",
                        "set requires_grad where a step begins",
                    )
                # What was frozen for a while has its hooks still.
                self._hook(
                    [
                        (name, parameter)
                        for name, parameter in trained.refresh()
                        if not any(one.has(parameter) for one in self._gradients)
                    ]
                )
        return loss

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Nothing: Horovod's hooks count the micro-batches (backward_passes_per_step)."""

    def forget(self) -> None:
        """Let the hooks count anew."""
        for one in self._gradients:
            one.forget()

    def sync_gradients(self) -> None:
        """Wait for the sums that the backward pass began."""
        with self._watch("gradients"):
            for one in self._gradients:
                one.average()

    def update(self, optimizer: Optimizer, step: Callable[[Optimizer], None]) -> None:
        """The step as it is; with Adasum the ranks' own steps, combined."""
        if self._settings.own["op"] == "adasum" and self.world_size > 1:
            with self._watch("updates"):
                gradients.combine_updates(self._hvd, optimizer, step, self._compressor)
        else:
            step(optimizer)

    def sum(self, tensor: Tensor) -> Tensor:
        """An all-reduce."""
        with self._watch("a sum"):
            self._hvd.allreduce_(tensor, name="sum", op=self._hvd.Sum)
        return tensor

    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """An all-reduce that is not waited for. On a GPU Horovod's end of it is waited for."""
        tensor = vector(numbers, self.device)
        # Horovod remembers what it knows of a name, and takes none that is still under way.
        self._later = (self._later + 1) % _MOST_LATER
        name = f"sum_async.{self._later}"
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)
        return Work(tensor, _Work(self._hvd, handle, self._watch))

    def broadcast_object(self, thing: T) -> T:
        """A broadcast of rank 0's object."""
        # Without a name Horovod takes that of the object's class, which may differ by rank.
        with self._watch("something of rank 0's"):
            shared: T = self._hvd.broadcast_object(thing, 0, name="share")
        return shared

    def gather_object(self, thing: T) -> list[T]:
        """An all-gather of pickles, as Horovod has no other."""
        with self._watch("the states of all ranks"):
            things: list[T] = self._hvd.allgather_object(thing, name="gather")
        return things if self.rank == 0 else []

    def meet(self, words: str) -> list[str]:
        """An all-gather under a name of its own, which Horovod takes for no other exchange."""
        with self._watch("the other ranks"):
            return list(self._hvd.allgather_object(words, name="meet"))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """A broadcast of each, as bytes, all under way at once."""
        with self._watch("weights or buffers of rank 0"):
            gradients.broadcast(self._hvd, tensors)

    def barrier(self) -> None:
        """Horovod's barrier."""
        with self._watch("a barrier"):
            self._hvd.barrier()

    def baseline(self) -> HorovodBaseline:
        """Over the same Horovod."""
        return HorovodBaseline(self._hvd)

    def explain(self, error: BaseException) -> HpctrainError | None:
        """After a failure that Horovod noticed: which ranks are lost, or have failed, and why.

        None where all are there: then it is a mistake of all of them, and Horovod says which.
        """
        internal = self._hvd.mpi_ops.HorovodInternalError
        if self._survivors is None or not isinstance(error, internal):
            return None
        found = self._survivors.ask()
        self._told = found is not None
        return found

    def close(self, failure: str | None = None) -> None:
        """Shut Horovod down and put the environment back."""
        others = None if self._told else self._survivors
        if others is not None and failure is not None and not others.tell(failure):
            # Rank 0 is gone or silent, so shutting down together would wait for it.
            self._connections.cut()
        if failure is None:
            self._hvd.shutdown()
        else:
            self._shut_down_alone()
        self._let_go(failure)

    def _shut_down_alone(self) -> None:
        """After a failure: a sum of Horovod's own that begins when the others are gone never ends.

        Its shutdown waits for that sum until gloo's time-out, half an hour; so, then, does its
        destructor at the end of the process, which is left without.
        """
        shutdown = self._hvd.mpi_ops._basics.shutdown
        thread = threading.Thread(target=shutdown, name="hvd.shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_SECONDS)
        if thread.is_alive():
            logger.warning("Horovod does not shut down, so this process leaves without")
            atexit.unregister(shutdown)
            atexit.register(_leave)

    def _complain(self) -> None:
        """This rank waits in vain: rank 0 looks for whom."""
        if self._survivors is not None:
            self._survivors.complain()

    def _give_up(self, failure: str) -> None:
        """Horovod did not come up here: let the others know."""
        self._environment.put_back()
        self._watch.close()
        if self._survivors is not None:
            self._survivors.tell(failure)
            self._survivors.leave(in_peace=False)
        if self._server is not None:
            # Whatever of Horovod still looks for others ends its process when nobody answers.
            Horovod._abandoned.append(self._server)

    def _let_go(self, failure: str | None) -> None:
        self._environment.put_back()
        self._watch.close()
        if self._survivors is not None:
            self._survivors.leave(in_peace=failure is None)
        if self._server is not None:
            self._server.close()
            self._server = None


def _leave() -> None:
    """End a process that has failed, without the destructors of its libraries."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class _Work:
    """A handle of Horovod, as torch.distributed's works are."""

    def __init__(self, hvd: ModuleType, handle: int, watch: Watch) -> None:
        self._hvd, self._handle, self._watch = hvd, handle, watch

    def is_completed(self) -> bool:
        """Whether `wait` returns at once."""
        return bool(self._hvd.poll(self._handle))

    def wait(self) -> None:
        """Until the sum is there."""
        with self._watch("sums of metrics"):
            self._hvd.synchronize(self._handle)


_HINTS = {
    "gloo": "",
    "mpi": "build Horovod with the MPI of that mpirun (hpctrain horovod build --mpi), or export "
    "HOROVOD_CONTROLLER=gloo, which needs none",
}
