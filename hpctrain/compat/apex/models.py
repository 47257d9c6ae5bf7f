"""What `amp.initialize` does to a model."""

import threading
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hpctrain.compat.apex.properties import Properties
from hpctrain.errors import UsageError
from hpctrain.precision import Precision, Settings
from hpctrain.precision.full import ApexO0
from hpctrain.precision.half import ApexO2, ApexO3
from hpctrain.precision.masters import Masters
from hpctrain.precision.mixed import ApexO1
from hpctrain.process.pytree import map_tensors

__all__ = ["Mastered", "check", "convert", "open_level", "take_from_copies"]


class Mastered(ApexO2):
    """O2 whose models save their masters and load them, under the names of their copies.

    Before the first backward pass masters are taken from their copies, as in Apex, since
    DistributedDataParallel has given these, and no others, the weights of rank 0. Masters that were
    loaded stay as they are, so a resumed script goes on with the same bits.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        super().__init__(device, settings)
        self.stale = True
        self._loaded: dict[Tensor, Tensor] = {}

    @property
    def pairs(self) -> Masters:
        """Masters and copies."""
        return self._masters

    def begin(self) -> None:
        """Before a backward pass."""
        if self.stale:
            self._masters.take_copies()
            self.stale = False

    def convert(self, model: nn.Module) -> None:
        """As Level2, and with hooks on the model's state."""
        super().convert(model)
        # torch marks the hook, which a method does not allow.
        model.register_state_dict_post_hook(partial(self._save))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._meet)  # type: ignore[no-untyped-call]
        # After that of Level2, which takes the masters from their copies.
        model.register_load_state_dict_post_hook(self._load)  # type: ignore[no-untyped-call]
        _LEVELS[model] = self

    def _save(self, model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Masters in the place of their copies, and fp32 for what else is in half precision."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = self.master(parameter).detach()
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype == torch.float16:
                state[name] = value.float()

    def _meet(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in model.named_parameters():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._loaded[self.master(parameter)] = value

    def _load(self, *_: Any) -> None:
        with torch.no_grad():
            for master, value in self._loaded.items():
                master.copy_(value)
        self._loaded.clear()
        self.stale = False


_LEVELS: WeakKeyDictionary[nn.Module, Mastered] = WeakKeyDictionary()


def take_from_copies(model: nn.Module) -> None:
    """Let masters of a model, or of models in it, be taken from their copies once more."""
    for module in model.modules():
        if module in _LEVELS:
            _LEVELS[module].stale = True


def open_level(properties: Properties, device: torch.device) -> Precision:
    """The precision of a level; scales are kept beside it, as each loss has its own."""
    kinds: dict[str, type[Precision]] = {"O0": ApexO0, "O1": ApexO1}
    kind = kinds.get(properties.level, Mastered if properties.masters else ApexO3)
    return kind(device, Settings(1.0, properties.keep_batchnorm_fp32))


def check(model: nn.Module) -> None:
    """Hold a model to what can be initialized.

    Raises:
        UsageError: it is wrapped already, or in half precision.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UsageError(
            f"amp.initialize() got a model inside of {type(model).__name__}",
            "the model itself, which is wrapped afterwards",
            "amp.initialize(model, optimizer), then DistributedDataParallel(model)",
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype == torch.float16:
            raise UsageError(
                f"amp.initialize() got a {type(model).__name__} whose {name} is in half precision",
                "a model in fp32, whatever the opt_level",
                "remove model.half()",
            )


def convert(
    model: nn.Module, properties: Properties, precision: Precision, outputs: torch.dtype | None
) -> None:
    """Change a model's weights as its level asks for, and what goes in and comes out.

    Args:
        model: changed in place.
        properties: for the level.
        precision: from `open_level`.
        outputs: type of what comes out; None for fp32 in the place of half precision, as losses
            are computed outside of the model.
    """
    precision.convert(model)
    if properties.level == "O0":
        model.float()
        model.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
        outputs = outputs or torch.float32
    if properties.autocast:
        kind = precision.device.type
        model.register_forward_pre_hook(partial(_enter, kind, ApexO1.half))
        model.register_forward_hook(_leave, always_call=True)
    if outputs is not None:
        model.register_forward_hook(partial(_cast_outputs, outputs))


# What is entered in a forward pass; a thread for each GPU of DataParallel. Not in the hooks
# themselves, so that a model can be copied and pickled.
_entered = threading.local()


def _enter(kind: str, half: torch.dtype, module: nn.Module, args: Any) -> None:
    del args
    context = torch.autocast(kind, half)
    context.__enter__()  # type: ignore[no-untyped-call]
    _stack().append((module, context))


def _leave(module: nn.Module, args: Any, outputs: Any) -> Any:
    del args
    # After an error this is also called where another hook failed before `_enter`.
    if _stack() and _stack()[-1][0] is module:
        _stack().pop()[1].__exit__(None, None, None)
    return map_tensors(_widen, outputs)


def _stack() -> list[tuple[nn.Module, torch.autocast]]:
    if not hasattr(_entered, "stack"):
        _entered.stack = []
    stack: list[tuple[nn.Module, torch.autocast]] = _entered.stack
    return stack


def _cast_inputs(
    kind: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    del module
    to = partial(_to, kind)
    return map_tensors(to, args), map_tensors(to, kwargs)


def _cast_outputs(kind: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    del module, args
    return map_tensors(partial(_to, kind), outputs)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == ApexO1.half else tensor


def _to(kind: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(kind) if tensor.is_floating_point() else tensor
