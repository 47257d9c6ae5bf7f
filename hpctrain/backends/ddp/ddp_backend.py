"""Models in DistributedDataParallel."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.backends.ddp import ddp_options
from hpctrain.backends.ddp.rehearsal import rehearse, rehearse_loss
from hpctrain.backends.distributed.process_group import ProcessGroup, transport_of
from hpctrain.backends.settings import BackendSettings
from hpctrain.backends.trained_parameters import TRAINED, Trained, reached
from hpctrain.backends.transparent import Transparent
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Rendezvous

__all__ = ["DDP", "TransparentDDP"]


class DDP(ProcessGroup):
    """Replicas that average their gradients during the backward pass."""

    name = "ddp"

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        self._own, self._deterministic = settings.own, settings.deterministic
        self.buffers_gradients = settings.own.get("gradient_as_bucket_view", True)
        if settings.own.get("compression") == "powersgd":
            self.reduction = "powersgd"
        self._trained: list[Trained] = []
        self._wrapped: list[TransparentDDP] = []
        self._accumulates = False  # whether only the last micro-batch of a step averages
        # Passes left in which the parameters that the loss does not use are looked for.
        self._first_passes = 0 if settings.own.get("static_graph") else _FIRST_PASSES
        super().__init__(rendezvous, device, settings)

    @classmethod
    def check(cls, world: World, device: torch.device, settings: BackendSettings) -> None:
        """Check whether this torch supports the options."""
        ddp_options.refuse_options(settings, transport_of(device))

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
        idle: list[TransparentDDP] = []
        for model in self._wrapped:
            # From the loss, torch finds unused parameters that the outputs of the model depend on.
            if model.synchronizes and (not model.passed or model.find_unused_parameters):
                idle.append(model)
            object.__setattr__(model, "passed", False)
        if self._accumulates:
            idle = self._used(idle, loss)
        for trained in self._trained:
            flags = list(map(TRAINED, trained.parameters))
            if flags != trained.flags and any(flags):
                self._take_up(trained, idle)
        if self._first_passes and any(one.synchronizes for one in self._wrapped):
            self._first_passes -= 1
            self._look_for_unused(loss, idle)
        if not idle:
            return loss
        if any(model.rehearses for model in idle):
            used = self._used(self._wrapped, loss)
            if any(model.rehearses for model in idle if model in used):
                rehearse_loss(used, loss)
                idle = used
            for model in used:
                model.rehearses = False
        for model in idle:
            loss = model.attach(loss)
        return loss

    def _look_for_unused(self, loss: Tensor, idle: list["TransparentDDP"]) -> None:
        """Let models expect no gradient for parameters that a loss does not use on some rank.

        Called by all ranks alike, in the first backward passes.

        Args:
            loss: loss of a micro-batch.
            idle: models that have to be prepared for its backward pass; others are added.
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
                    "from now on, as with --ddp find-unused-parameters",
                    _first(names) if names else "some parameters on another rank",
                )
                self._renew(model, find_unused_parameters=True)
                if model not in idle:
                    idle.append(model)

    def has_unused(self, model: nn.Module) -> bool:
        """Return whether DistributedDataParallel looks for unused parameters in each step."""
        return any(one.find_unused_parameters for one in self._of(model))

    def expect_unused(self, model: nn.Module) -> None:
        """Let DistributedDataParallel look for unused parameters in each step."""
        for one in self._of(model):
            if not one.find_unused_parameters:
                self._renew(one, find_unused_parameters=True)

    def _used(self, models: list["TransparentDDP"], loss: Tensor) -> list["TransparentDDP"]:
        """Return those of the models that a loss uses, and those that expect a loss of others."""
        if len(self._wrapped) == 1:
            return models
        used = reached(loss)
        return [
            model
            for model in models
            if used is None
            or model.find_unused_parameters
            or not used.isdisjoint(map(id, model.module.parameters()))
        ]

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

    def _take_up(self, trained: Trained, idle: list["TransparentDDP"]) -> None:
        """Exchange the gradients of the parameters trained now; add the model to those to prepare.

        Called by all ranks alike.
        """
        wrapped = [model for model in self._wrapped if model.module is trained.model]
        if wrapped and not wrapped[0].synchronizes:
            return  # the last micro-batch of the step is early enough
        trained.refresh()
        if wrapped:
            self._renew(wrapped[0])
        else:
            wrapped = [self._wrap(trained, init_sync=False)]
        idle += [model for model in wrapped if model not in idle]

    def sync_gradients(self) -> None:
        """Rearrange the messages of the gradients, once for each model; called by all ranks.

        torch does this at the beginning of the second forward pass, and waits there for all ranks.
        But a rank may take a forward pass alone, or be elsewhere.
        """
        for model in self._wrapped:
            if not model.rearranged and model.reducer._rebuild_buckets():
                object.__setattr__(model, "rearranged", True)  # avoids the checks of nn.Module

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Let `attach` prepare the model from now on, and not a forward pass.

        torch would average in a later micro-batch if no backward pass follows a forward pass.
        """
        if isinstance(model, TransparentDDP):
            self._accumulates = True
            model.require_backward_grad_sync, model.synchronizes = False, wanted
            model.averaged = False

    def take_unaveraged(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the models that no pass of this micro-batch used, or is expected to."""
        left = [model for model in self._wrapped if not model.averaged]
        for model in left:
            model.averaged = True
        own = {id(p) for model in left for p in model.module.parameters() if p.requires_grad}
        return [parameter for parameter in parameters if id(parameter) in own]

    def explain(self, error: BaseException) -> HpctrainError | None:
        """Return an error for missing gradients, or for a lost or unresponsive rank; else None."""
        if isinstance(error, RuntimeError) and "Expected to have finished" in str(error):
            return self._unused(str(error))
        return super().explain(error)

    def _unused(self, text: str) -> HpctrainError:
        """Return the error for parameters that had no gradient in the last step.

        torch gives their indices, in the order of the trained parameters.
        """
        listed = _NUMBERS.search(text)
        numbers = [int(number) for number in listed[1].split()] if listed else []
        for model in self._wrapped:
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            if numbers and max(numbers) < len(names):
                parameters = _first([names[number] for number in numbers])
                break
        else:
            parameters = "parameters that the model no longer has"
        return UsageError("HT310.no-gradient", parameters=parameters)


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
        synchronizes: whether its next backward pass averages the gradients.
        averaged: whether a backward pass of this micro-batch averages its gradients.
        passed: whether a forward pass has prepared the next backward pass.
        rearranged: whether the messages follow the order in which the gradients were ready.
        own_hook: communication hook of the script and its state, if there is one.
    """

    rehearses = False
    synchronizes = True
    averaged = False
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
        """Run DistributedDataParallel's forward pass, after a rehearsal if one is due.

        Inside a transform of torch.func, the model runs alone: `DDP.attach` prepares the backward
        pass of the loss, which is outside. torch has no public call that tells.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return self.module(*inputs, **keywords)
        if torch.is_grad_enabled():
            # Frozen parameters would be waited for. After a change, `DDP.attach` rehearses.
            if self.rehearses and not self._trained.changed:
                self.rehearses = False
                rehearse(self, inputs, keywords)
            # Avoids the checks of nn.Module.
            object.__setattr__(self, "passed", self.require_backward_grad_sync)
        return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]

    def attach(self, loss: Tensor) -> Tensor:
        """Prepare the backward pass of a loss that `forward` did not compute.

        DistributedDataParallel runs a model that returns its input: it needs only the inputs and
        outputs of a model.
        """
        self.averaged = True
        module, prepares = self._modules["module"], self.require_backward_grad_sync
        self._modules["module"], self.require_backward_grad_sync = _AS_IT_IS, True
        try:
            attached: Tensor = DistributedDataParallel.forward(self, loss)  # type: ignore[no-untyped-call]
        finally:
            self._modules["module"], self.require_backward_grad_sync = module, prepares
        return attached


_AS_IT_IS = nn.Identity()


# A GAN has three passes in a step; some more for a second step.
_FIRST_PASSES = 6
_NUMBERS = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def _first(names: Sequence[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])


_SHOWN = 5
