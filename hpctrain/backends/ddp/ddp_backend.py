"""The default process group of torch.distributed, and models in DistributedDataParallel."""

import datetime
import inspect
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hpctrain.backends.barrier import absent, assemble, host_of
from hpctrain.backends.base import Backend, Work, vector
from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.ddp import ddp_options, text_exchange
from hpctrain.backends.ddp.flight_recorder import FlightRecorder
from hpctrain.backends.ddp.rehearsal import reached, rehearse, rehearse_loss
from hpctrain.backends.ddp.store import first_line, open_store
from hpctrain.backends.settings import BackendSettings
from hpctrain.backends.trained_parameters import Trained
from hpctrain.backends.transparent import Transparent
from hpctrain.cluster.env_vars import GLOO_INTERFACE
from hpctrain.cluster.texts import ranks_text
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, RankLostError, RankMissingError, StartError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.interfaces import interface_of

__all__ = ["DDP", "TransparentDDP"]

T = TypeVar("T")


class DDP(Backend):
    """The backend over torch.distributed's default process group, connected by the rendezvous."""

    name = "ddp"

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        if dist.is_initialized():
            raise UsageError(
                "HT308",
                "torch.distributed is initialized already",
                "the Session initializes it",
                "remove the script's own init_process_group()",
                "close the earlier Session first",
            )
        self.device, self._own = device, settings.own
        self._deterministic, self._rendezvous = settings.deterministic, rendezvous
        self._trained: list[Trained] = []
        self._wrapped: list[TransparentDDP] = []
        # Passes left in which the parameters that the loss does not use are looked for.
        self._first_passes = 0 if settings.own.get("static_graph") else _FIRST_PASSES
        self.transport = _transport(device)
        self._environment = Environment(os.environ)
        self._aside: Any = None  # process group of sums in the background, if it is its own
        world, own = rendezvous.world, rendezvous.roster.addresses[rendezvous.world.rank]
        start_timeout = settings.start_timeout
        limits = [
            datetime.timedelta(seconds=seconds) for seconds in (start_timeout, settings.timeout)
        ]
        if self.transport == "gloo":
            # gloo reads the interface from the environment only. Its default is the address of the
            # host's own name: on many clusters 127.0.1.1.
            self._environment.default(GLOO_INTERFACE, interface_of(own))
            self._recorder = None
        else:
            self._recorder = FlightRecorder(self._environment, world.rank)
        try:
            store = open_store(rendezvous, limits[0])
            assemble(PrefixStore(f"{rendezvous.nonce}/here", store), rendezvous, start_timeout)
            connected = PrefixStore(f"{rendezvous.nonce}/connected", store)
            try:
                dist.init_process_group(
                    self.transport,
                    store=PrefixStore(rendezvous.nonce, store),
                    rank=world.rank,
                    world_size=world.world_size,
                    timeout=limits[0],
                    device_id=device if device.type == "cuda" else None,
                )
            except BaseException:
                absent(connected, world.rank)
                raise
            assemble(connected, rendezvous, start_timeout)
            # When a rank is lost, a sum of gloo that fails may keep back the later messages of its
            # process group. So gradients do not share one with sums that nobody waits for yet.
            if self.transport == "gloo":
                self._aside = dist.new_group(timeout=limits[0])
            for group in (None, self._aside):
                _set_timeout(limits[1], group)
            store.set_timeout(limits[1])
            self._store, self._exchanges = PrefixStore(f"{rendezvous.nonce}/texts", store), 0
        except StartError:
            self._put_back()
            raise
        except (RuntimeError, ValueError) as error:
            self._put_back()
            raise RankMissingError(
                "HT306",
                f"torch.distributed did not connect rank {world.rank} over {self.transport} from "
                f"{own} within {start_timeout:.0f} s: {_named(error, rendezvous)}",
                "a connection between all ranks",
                "look for a firewall or a host that cannot be reached (hosts of the ranks: "
                f"{', '.join(world.hosts or ())})",
                "export HPCTRAIN_INTERFACE=NAME (where the ranks use a wrong interface)",
            ) from None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def check(cls, world: World, device: torch.device, settings: BackendSettings) -> None:
        """Check whether this torch supports the options."""
        del world
        ddp_options.refuse_options(settings, _transport(device))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in DistributedDataParallel, or itself if no parameter is trained.

        Raises:
            UsageError: the compression does not support the gradients.
        """
        self._trained.append(trained := Trained(model))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self.broadcast([*model.parameters(), *model.buffers()])
            return model
        wrapped = self._wrap(trained, init_sync=True)
        self.broadcast(list(model.buffers()))
        return wrapped

    def _wrap(self, trained: Trained, init_sync: bool) -> "TransparentDDP":
        model = trained.model
        ddp_options.check_model(model, self._own["compression"], self.transport)
        wrapped = TransparentDDP(trained, {**self._arguments(model), "init_sync": init_sync})
        ddp_options.compress(wrapped, self._own)
        wrapped.rehearses = self._deterministic
        self._wrapped.append(wrapped)
        return wrapped

    def _arguments(self, model: nn.Module) -> dict[str, Any]:
        return {
            "device_ids": [self.device] if self.device.type == "cuda" else None,
            **ddp_options.arguments(model, self._own, self.transport),
            **NO_BUFFERS_IN_FORWARD,
        }

    def attach(self, loss: Tensor) -> Tensor:
        """Prepare the models that no forward pass has prepared, and those that have changed."""
        idle = []
        for model in self._wrapped:
            # From the loss, torch finds unused parameters that the outputs of the model depend on.
            if model.require_backward_grad_sync and (
                not model.passed or model.find_unused_parameters
            ):
                idle.append(model)
            object.__setattr__(model, "passed", False)
        for trained in self._trained:
            if trained.changed():
                idle = self._take_up(trained, idle)
        if self._first_passes and any(one.require_backward_grad_sync for one in self._wrapped):
            self._first_passes -= 1
            idle = self._look_for_unused(loss, idle)
        if not idle:
            return loss
        rehearsed = [model for model in idle if model.rehearses and _uses(loss, model.module)]
        if rehearsed:
            rehearse_loss(self._wrapped, loss)
            for model in rehearsed:
                model.rehearses = False
            idle = self._wrapped
        for model in idle:
            loss = model.attach(loss)
        return loss

    def _look_for_unused(
        self, loss: Tensor, idle: list["TransparentDDP"]
    ) -> list["TransparentDDP"]:
        """Let models expect no gradient for parameters that a loss does not use on some rank.

        Called by all ranks alike, in the first backward passes.

        Args:
            loss: loss of a micro-batch.
            idle: models that have to be prepared for its backward pass.

        Returns:
            The models that have to be prepared now.
        """
        used = reached(loss)
        lists: list[list[str]] = []
        for model in self._wrapped:
            trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            unused = [n for n, p in trained if used is not None and id(p) not in used]
            lists.append([] if len(unused) == len(trained) else unused)
        counts = torch.tensor([len(names) for names in lists], device=self.device)
        for model, names, count in zip(
            self._wrapped, lists, self.sum(counts).tolist(), strict=True
        ):
            if count and not model.find_unused_parameters:
                logger.info(
                    "the loss does not use %s: the ranks look for such parameters in each step "
                    "from now on, as with --ddp-find-unused-parameters",
                    _shortened(names) if names else "some parameters on another rank",
                )
                self._renew(model, find_unused_parameters=True)
                idle = [*(one for one in idle if one is not model), model]
        return idle

    def has_unused(self, model: nn.Module) -> bool:
        """Return whether DistributedDataParallel looks for unused parameters in each step."""
        return any(one.find_unused_parameters for one in self._of(model))

    def expect_unused(self, model: nn.Module) -> None:
        """Let DistributedDataParallel look for unused parameters in each step."""
        for one in self._of(model):
            if not one.find_unused_parameters:
                self._renew(one, find_unused_parameters=True)

    def _of(self, model: nn.Module) -> list["TransparentDDP"]:
        return [one for one in self._wrapped if model in (one, one.module)]

    def _renew(self, model: "TransparentDDP", **arguments: Any) -> None:
        """Initialize a wrapped model again, with the parameters that are trained now."""
        # No exchange of weights: they are equal, and the next backward pass needs them unchanged.
        found = model.find_unused_parameters
        own = {**self._arguments(model.module), "init_sync": False}
        model.renew({**own, "find_unused_parameters": found, **arguments})
        model.rehearses = self._deterministic
        ddp_options.compress(model, self._own)

    def _take_up(self, trained: Trained, idle: list["TransparentDDP"]) -> list["TransparentDDP"]:
        """Exchange the gradients of the parameters trained now; return the models to prepare.

        Called by all ranks alike.
        """
        wrapped = [model for model in self._wrapped if model.module is trained.model]
        if wrapped and not wrapped[0].require_backward_grad_sync:
            return idle  # the last micro-batch of the step is early enough
        trained.refresh()
        if wrapped:
            self._renew(wrapped[0])
        else:
            wrapped = [self._wrap(trained, init_sync=False)]
        return [*(model for model in idle if model not in wrapped), *wrapped]

    def sync_gradients(self) -> None:
        """Rearrange the messages of the gradients, once for each model; called by all ranks.

        torch does this at the beginning of the second forward pass, and waits there for all ranks.
        But a rank may take a forward pass alone, or be elsewhere.
        """
        for model in self._wrapped:
            if not model.rearranged and model.reducer._rebuild_buckets():
                object.__setattr__(model, "rearranged", True)  # avoids the checks of nn.Module

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Switch the flag of DistributedDataParallel.no_sync() without its context manager."""
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = wanted

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
        """Exchange the texts by messages with their own tag, or by the store with NCCL."""
        if self.transport == "gloo":
            return text_exchange.by_messages(self.rank, self.world_size, text)
        self._exchanges += 1
        return text_exchange.by_store(
            self._store, self._exchanges, self.rank, self.world_size, text
        )

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
        """Return an error for a lost or unresponsive rank, or for missing gradients; else None."""
        if not isinstance(error, RuntimeError):
            return None
        if "Expected to have finished reduction" in str(error):
            return self._unused(str(error))
        if not _LOST.search(str(error)):
            return None
        return RankLostError(
            "HT309",
            f"rank {self.rank} lost another rank: {_named(error, self._rendezvous)}",
            "all ranks until the end of the run",
            "look for the first error in the logs of the other ranks, and check their hosts",
            "--resume (from the newest checkpoint; in a job, hpctrain run does so by itself)",
        )

    def _unused(self, text: str) -> HpctrainError:
        """Return the error for parameters that had no gradient in the last step.

        torch gives their indices, in the order of the trained parameters.
        """
        listed = _NUMBERS.search(text)
        numbers = [int(number) for number in listed[1].split()] if listed else []
        for model in self._wrapped:
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            if numbers and max(numbers) < len(names):
                shown = _shortened([names[number] for number in numbers])
                break
        else:
            shown = "parameters that the model no longer has"
        return UsageError(
            "HT310",
            f"no gradient was computed for {shown}: the loss does not depend on them, so the ranks "
            "wait for each other",
            "a loss that depends on every trained parameter; the same layers as in "
            "session.prepare()",
            "--ddp-find-unused-parameters (for parts that some steps leave out)",
            "requires_grad_(False) for parameters that are not trained",
            "--backend horovod",
        )

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


# Buffers are synchronized before an evaluation, not in every step: so the only collective of a
# step is that of its gradients. torch 2.15 renamed the argument.
_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFERS_IN_FORWARD: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers": False
}


class TransparentDDP(Transparent, DistributedDataParallel):
    """DistributedDataParallel that exposes the attributes, names and state of the model inside.

    Args:
        trained: model to wrap, with a record of its trained parameters.
        arguments: further arguments of DistributedDataParallel.

    Attributes:
        rehearses: whether its next pass with gradients is rehearsed first.
        passed: whether a forward pass has prepared the next backward pass.
        rearranged: whether the messages follow the order in which the gradients were ready.
        own_hook: communication hook of the script and its state, if there is one.
    """

    rehearses = False
    passed = False
    rearranged = False
    own_hook: tuple[object, Callable[..., Any]] | None = None

    def __init__(self, trained: Trained, arguments: dict[str, Any]) -> None:
        super().__init__(trained.model, **arguments)
        self._trained = trained

    def renew(self, arguments: dict[str, Any]) -> None:
        """Initialize again with the parameters that are trained now; called by all ranks.

        The old reducer removes its hooks (`Reducer::~Reducer`, torch/csrc/distributed/c10d/
        reducer.cpp, torch 2.15).
        """
        training = self.training
        DistributedDataParallel.__init__(self, self.module, **arguments)
        self.training = training
        self.rearranged = False
        if self.own_hook is not None:
            super().register_comm_hook(*self.own_hook)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook of the script, also after the parameters that are trained change."""
        super().register_comm_hook(state, hook)
        self.own_hook = state, hook

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run DistributedDataParallel's forward pass, after a rehearsal if one is due."""
        if torch.is_grad_enabled():
            # Frozen parameters would be waited for. After a change, `DDP.attach` rehearses.
            if self.rehearses and not self._trained.changed():
                self.rehearses = False
                rehearse(self, inputs, keywords)
            object.__setattr__(self, "passed", True)  # avoids the checks of nn.Module
        return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]

    def attach(self, loss: Tensor) -> Tensor:
        """Prepare the backward pass of a loss that `forward` did not compute.

        DistributedDataParallel runs a model that returns its input: it needs only the inputs and
        outputs of a model.
        """
        module = self._modules["module"]
        self._modules["module"] = _AS_IT_IS
        try:
            attached: Tensor = DistributedDataParallel.forward(self, loss)  # type: ignore[no-untyped-call]
        finally:
            self._modules["module"] = module
        return attached


_AS_IT_IS = nn.Identity()


# Messages in gloo's pair.cc and unbound_buffer.cc, and in ProcessGroupNCCL.cpp, torch 2.15.
_LOST = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Timed out waiting|Application timeout"
    r"|NCCL (error|communicator)|remote process (exited|has terminated)",
    re.IGNORECASE,
)


# A GAN has three passes in a step; some more for a second step.
_FIRST_PASSES = 6
_NUMBERS = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_SHOWN = 5


def _uses(loss: Tensor, module: nn.Module) -> bool:
    """Check whether a loss depends on parameters of a model."""
    used = reached(loss)
    return used is None or not used.isdisjoint(map(id, module.parameters()))


def _shortened(names: Sequence[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])


def _transport(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the time-out of each collective of a group (None: the default one) from now on.

    torch 2.15 renamed the function.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def _named(error: Exception, rendezvous: Rendezvous) -> str:
    """Return torch's message, with the ranks and hosts of the addresses in it."""
    roster, text = rendezvous.roster, first_line(error)
    if len(set(roster.addresses)) == 1:
        return text
    for address in dict.fromkeys(roster.addresses):
        ranks = [rank for rank, other in enumerate(roster.addresses) if other == address]
        host = host_of(rendezvous, ranks[0])
        if address in text and host not in text:
            text += f" ({address} is {host}, with {ranks_text(ranks)})"
    return text
