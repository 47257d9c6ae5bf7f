"""Changes that `amp.initialize` makes to a model."""

import threading
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hpctrain.compat.apex.properties import Properties
from hpctrain.errors import UsageError
from hpctrain.precision import Precision, PrecisionSettings
from hpctrain.precision.full import ApexO0
from hpctrain.precision.half import ApexO2, ApexO3, cast, cast_inputs, widen
from hpctrain.precision.mixed import ApexO1
from hpctrain.process.pytree import map_tensors

__all__ = ["Mastered", "check", "convert", "open_level", "take_from_copies"]


class Mastered(ApexO2):
    """O2 whose models save and load their master weights, under the names of the copies.

    Before the first backward pass the masters are set from their copies, as in Apex, because
    DistributedDataParallel broadcasts the weights of rank 0 to the copies only. Masters that were
    loaded stay unchanged, so a resumed script continues with the same bits.
    """

    def __init__(self, device: torch.device, settings: PrecisionSettings) -> None:
        super().__init__(device, settings)
        self.stale = True

    def begin(self) -> None:
        """Set stale masters from their copies before a backward pass."""
        if self.stale:
            with torch.no_grad():
                for copy, master in self._masters.items():
                    master.copy_(copy)
            self.stale = False

    def convert(self, model: nn.Module) -> None:
        """Convert a model as `ApexO2` does, and add hooks to save and load its masters."""
        super().convert(model)
        # torch sets an attribute on the hook, which a method does not allow.
        model.register_state_dict_post_hook(partial(self._save))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._load)  # type: ignore[no-untyped-call]
        _LEVELS[model] = self

    def _save(self, model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace copies with their masters, and cast other tensors in half precision to fp32."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = self.master(parameter).detach()
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype == torch.float16:
                state[name] = value.float()

    @torch.no_grad()
    def _load(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load masters before torch loads their copies, which get the same values."""
        for name, parameter in model.named_parameters():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                master = self.master(parameter)
                state[prefix + name] = master.copy_(value)
        self.stale = False


_LEVELS: WeakKeyDictionary[nn.Module, Mastered] = WeakKeyDictionary()


def take_from_copies(model: nn.Module) -> None:
    """Mark the masters of a model and of its submodules, to set them from their copies again."""
    for module in model.modules():
        if module in _LEVELS:
            _LEVELS[module].stale = True


def open_level(properties: Properties, device: torch.device) -> Precision:
    """Return the precision of a level, without loss scales, as each loss has its own scale."""
    kinds: dict[str, type[Precision]] = {"O0": ApexO0, "O1": ApexO1}
    kind = kinds.get(properties.level, Mastered if properties.masters else ApexO3)
    return kind(device, PrecisionSettings(1.0, properties.keep_batchnorm_fp32))


def check(model: nn.Module) -> None:
    """Check that a model can be initialized.

    Raises:
        UsageError: the model is already wrapped, or has tensors in half precision.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UsageError("HT413.wrapped-model", wrapper=type(model).__name__)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype == torch.float16:
            raise UsageError("HT404.half-before-amp", model=type(model).__name__, name=name)


def convert(
    model: nn.Module, properties: Properties, precision: Precision, outputs: torch.dtype | None
) -> None:
    """Convert a model's weights, inputs and outputs to the types of its level.

    Args:
        model: model, which is changed in place.
        properties: settings of the level.
        precision: precision from `open_level`.
        outputs: type of the outputs; None for fp32 instead of half precision, as losses are
            computed outside of the model.
    """
    precision.convert(model)
    if properties.level == "O0":
        model.float()
        model.register_forward_pre_hook(partial(cast_inputs, torch.float32), with_kwargs=True)
        outputs = outputs or torch.float32
    if properties.autocast:
        kind = precision.device.type
        model.register_forward_pre_hook(partial(_enter, kind, ApexO1.half))
        model.register_forward_hook(_leave, always_call=True)
    if outputs is not None:
        model.register_forward_hook(partial(_cast_outputs, outputs))


class _Entered(threading.local):
    """Autocast contexts of the running forward passes. DataParallel has a thread for each GPU.

    They are not in the hooks themselves, so that a model can be copied and pickled.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, torch.autocast]] = []


_entered = _Entered()


def _enter(kind: str, half: torch.dtype, module: nn.Module, args: Any) -> None:
    del args
    context = torch.autocast(kind, half)
    context.__enter__()  # type: ignore[no-untyped-call]
    _entered.stack.append((module, context))


def _leave(module: nn.Module, args: Any, outputs: Any) -> Any:
    del args
    # After an error torch also calls this if another hook failed before `_enter`.
    if _entered.stack and _entered.stack[-1][0] is module:
        _entered.stack.pop()[1].__exit__(None, None, None)
    return map_tensors(widen, outputs)


def _cast_outputs(kind: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    del module, args
    return cast(kind, outputs)
