"""Precisions with models in half precision: O2, with fp32 master weights, and O3, without.

Sources: "opt_levels and Properties" in the documentation of apex.amp; for the masters, Micikevicius
et al., "Mixed Precision Training", 2018 (arXiv 1710.03740), section 3.1.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hpctrain.errors import UsageError
from hpctrain.precision.base import Precision, PrecisionSettings
from hpctrain.process.pytree import map_tensors

__all__ = ["ApexO2", "ApexO3", "cast", "cast_inputs", "widen"]

_HALF = torch.float16


class ApexO3(Precision):
    """O3: all in half precision, by default without a loss scale, as a baseline for speed.

    Inputs of a model are cast to half precision, its outputs to fp32, so the loss is in fp32.
    """

    name = "O3"
    reduced = True
    takes = frozenset({"loss_scale", "keep_batchnorm_fp32"})
    keeps_batchnorm: ClassVar[bool] = False

    def convert(self, model: nn.Module) -> None:
        """Convert weights and buffers to half precision, in place, except a kept batch norm.

        An average of weights stays in fp32, and gets the weights that the optimizer updates: half
        precision would round away the small steps of an average.
        """
        if isinstance(model, AveragedModel):
            update = model.update_parameters
            model.update_parameters = (  # type: ignore[method-assign]
                lambda model: update(_Widened(model, self.master))  # type: ignore[arg-type]
            )
            model.register_forward_pre_hook(partial(cast_inputs, torch.float32), with_kwargs=True)
            return
        keep = self.settings.keep_batchnorm_fp32
        keep = self.keeps_batchnorm if keep is None else keep
        for module in model.modules():
            if keep and isinstance(module, _BatchNorm):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    self._halve(parameter)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(_HALF))
        model.register_forward_pre_hook(partial(cast_inputs, _HALF), with_kwargs=True)
        model.register_forward_hook(_widen_outputs)

    def _halve(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(_HALF)


class ApexO2(ApexO3):
    """O2: fp32 master weights, a dynamic loss scale, and batch norm in fp32.

    The optimizer updates the master weights. The model's weights are copies, made after each step.
    """

    name = "O2"
    default_loss_scale = "dynamic"
    keeps_batchnorm = True

    def __init__(self, device: torch.device, settings: PrecisionSettings) -> None:
        super().__init__(device, settings)
        # Masters by their copies, in the order of the models' parameters; and the other way.
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._copies: dict[Tensor, nn.Parameter] = {}
        self._collected: set[int] = set()  # optimizers whose masters have this step's gradients

    @property
    def requires_synced_skip(self) -> bool:
        """True, because the masters get the gradients that the ranks have averaged."""
        return True

    def convert(self, model: nn.Module) -> None:
        """Convert as O3 does, with masters; weights loaded into the model later also go to them."""
        super().convert(model)
        if isinstance(model, AveragedModel):
            return
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    lambda loaded, _: self._refresh(loaded)
                )

    def _halve(self, parameter: nn.Parameter) -> None:
        if parameter not in self._masters:
            data = parameter.detach().to(torch.float32, copy=True)
            master = nn.Parameter(data, parameter.requires_grad)
            self._masters[parameter], self._copies[master] = master, parameter
        super()._halve(parameter)

    @torch.no_grad()
    def _refresh(self, module: nn.Module) -> None:
        """Update the masters of a module where other values were loaded into their copies."""
        for copy in module.parameters(recurse=False):
            master = self._masters.get(copy)
            if master is not None:
                same = master.to(copy.dtype) == copy
                master.copy_(torch.where(same, master, copy.to(master.dtype)))

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's parameters by the masters, with the state of their copies."""
        for group in optimizer.param_groups:
            group["params"] = [self.master(parameter) for parameter in group["params"]]
        for copy, master in self.pairs(optimizer):
            if copy in optimizer.state:
                state = optimizer.state.pop(copy)
                # A momentum in half precision becomes fp32.
                optimizer.state[master] = map_tensors(widen, state)

    def master(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter in half precision; else the parameter itself."""
        return self._masters.get(parameter, parameter)

    def copy_of(self, master: Tensor) -> Tensor:
        """Return the copy of a master in the model; else the parameter itself."""
        return self._copies.get(master, master)

    def masters(self) -> Sequence[Tensor]:
        """Return all masters, in the order of the models' parameters."""
        return [master.detach() for master in self._masters.values()]

    def pairs(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield the copies and masters of an optimizer."""
        for group in optimizer.param_groups:
            for master in group["params"]:
                copy = self._copies.get(master)
                if copy is not None:
                    yield copy, master

    def collect(self, optimizer: Optimizer) -> None:
        """Copy the gradients to the masters; once per step."""
        if id(optimizer) in self._collected:
            return
        self._collected.add(id(optimizer))
        if any(p in self._masters for group in optimizer.param_groups for p in group["params"]):
            self.adopt(optimizer)  # a group that was added later
        for copy, master in self.pairs(optimizer):
            master.grad = None if copy.grad is None else copy.grad.to(torch.float32)

    def copy_back(self, optimizer: Optimizer) -> None:
        """Copy the masters of an optimizer to their copies, at the end of a step."""
        self._collected.discard(id(optimizer))
        pairs = list(self.pairs(optimizer))
        if pairs:
            copies, masters = zip(*pairs, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(copies, masters)

    def unscale(self, optimizer: Optimizer) -> None:
        """Copy the gradients to the masters, and divide them by the loss scale."""
        self.collect(optimizer)
        super().unscale(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the masters, then renew their copies."""
        self.collect(optimizer)
        super().step(optimizer)
        self.copy_back(optimizer)

    def clear(self, optimizer: Optimizer) -> None:
        """Clear the gradients of the copies."""
        self._collected.discard(id(optimizer))
        for copy, _ in self.pairs(optimizer):
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the masters, as the checkpoint's model is in half precision."""
        return {**super().state_dict(), "masters": list(self.masters())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the masters, and renew their copies.

        Raises:
            UsageError: the masters belong to other models.
        """
        super().load_state_dict(state)
        if "masters" not in state:
            return
        saved, own = state["masters"], self.masters()
        if [tuple(m.shape) for m in saved] != [tuple(m.shape) for m in own]:
            raise UsageError(
                "HT405.master-weights-differ", saved_count=len(saved), model_count=len(own)
            )
        with torch.no_grad():
            for (copy, master), value in zip(self._masters.items(), saved, strict=True):
                master.copy_(value)
                copy.copy_(value)


class _Widened:
    """What `AveragedModel.update_parameters` reads of a model, in fp32.

    Args:
        model: model in half precision.
        master: returns what the optimizer updates for a parameter.
    """

    def __init__(self, model: nn.Module, master: Callable[[Tensor], Tensor]) -> None:
        self._model, self._master = model, master

    def parameters(self) -> Iterator[Tensor]:
        return map(widen, map(self._master, self._model.parameters()))

    def buffers(self) -> Iterator[Tensor]:
        return map(widen, self._model.buffers())


def cast_inputs(
    kind: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Cast the floating-point inputs of a model to a type, as a hook before its forward pass."""
    del module
    return cast(kind, args), cast(kind, kwargs)


def cast(kind: torch.dtype, things: Any) -> Any:
    """Cast the floating-point tensors in a structure to a type."""
    return map_tensors(lambda one: one.to(kind) if one.is_floating_point() else one, things)


def _widen_outputs(module: nn.Module, args: Any, outputs: Any) -> Any:
    del module, args
    return map_tensors(widen, outputs)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in half precision in fp32; others as they are."""
    return tensor.float() if tensor.dtype == _HALF else tensor
