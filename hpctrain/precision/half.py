"""Precisions with models in half precision: O2, with fp32 master weights, and O3, without.

Source: "opt_levels and Properties" in the documentation of apex.amp.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hpctrain.precision.base import Precision, PrecisionSettings
from hpctrain.precision.masters import Masters
from hpctrain.process.pytree import map_tensors

__all__ = ["ApexO2", "ApexO3"]

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
        """Convert weights and buffers to half precision, in place, except a kept batch norm."""
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
        model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        model.register_forward_hook(_cast_outputs)

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
        self._masters = Masters()

    @property
    def requires_synced_skip(self) -> bool:
        """True, because the masters get the gradients that the ranks have averaged."""
        return True

    def convert(self, model: nn.Module) -> None:
        """Convert as O3 does, with masters; weights loaded into the model later also go to them."""
        super().convert(model)
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    lambda loaded, _: self._masters.refresh(loaded.parameters(recurse=False))
                )

    def _halve(self, parameter: nn.Parameter) -> None:
        self._masters.keep(parameter)
        super()._halve(parameter)

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's parameters by the masters, with the state of their copies."""
        self._masters.give(optimizer)

    def master(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter in half precision; else the parameter itself."""
        return self._masters.of(parameter)

    def masters(self) -> Sequence[Tensor]:
        """Return all masters, in the order of the models' parameters."""
        return self._masters.all()

    def unscale(self, optimizer: Optimizer) -> None:
        """Copy the gradients to the masters, and divide them by the loss scale."""
        self._masters.collect(optimizer)
        super().unscale(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the masters, then renew their copies."""
        self._masters.collect(optimizer)
        super().step(optimizer)
        self._masters.copy_back(optimizer)

    def clear(self, optimizer: Optimizer) -> None:
        """Clear the gradients of the copies."""
        self._masters.clear(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the masters, as the checkpoint's model is in half precision."""
        return {**super().state_dict(), "masters": list(self._masters.all())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the masters, and renew their copies."""
        super().load_state_dict(state)
        if "masters" in state:
            self._masters.load(state["masters"])


def _cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    del module
    return map_tensors(_to_half, args), map_tensors(_to_half, kwargs)


def _cast_outputs(module: nn.Module, args: Any, outputs: Any) -> Any:
    del module, args
    return map_tensors(_to_single, outputs)


def _to_half(tensor: Tensor) -> Tensor:
    return tensor.to(_HALF) if tensor.is_floating_point() else tensor


def _to_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == _HALF else tensor
