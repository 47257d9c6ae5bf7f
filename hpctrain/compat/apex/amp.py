"""apex.amp: models in mixed precision, and losses with a scale.

Source: https://nvidia.github.io/apex/amp.html and advanced.html. Differences from Apex:

- O1 runs only the forward pass of a model under `torch.autocast`; Apex patched torch for the whole
  process. Outputs in half precision are cast to fp32, so a loss is computed in fp32.
- Under O2 a model's `state_dict()` contains the fp32 master weights themselves, and loads them.
- A step that overflows is skipped under a fixed loss scale as well, unless the scale is 1 and there
  are no master weights.
- CPUs are supported.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.compat.apex import model_conversion as conversion
from hpctrain.compat.apex.adopted import Adopted, master_params
from hpctrain.compat.apex.properties import settle
from hpctrain.compat.apex.scale import Scale
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]


@dataclass(frozen=True, slots=True)
class _State:
    """State that `initialize` keeps for the other functions.

    Attributes:
        scales: scale of each loss; empty if amp is not enabled.
        verbose: whether overflows are logged.
    """

    scales: Sequence[Scale] = ()
    verbose: bool = False


_state: _State | None = None


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    *,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    **properties: Any,
) -> Any:
    """Convert models and optimizers to a precision, before the models are wrapped.

    Args:
        models: models on their device, in fp32; models and optimizers are changed in place.
        optimizers: optimizers of the models' parameters; None for inference.
        enabled: False to change nothing, here and in the other functions.
        opt_level: level from O0 to O3.
        cast_model_outputs: type of all outputs of the models; None for fp32.
        num_losses: number of losses, each with its own scale.
        verbosity: 0 to log no overflows.
        min_loss_scale: lower bound of a dynamic scale; None for no bound.
        max_loss_scale: upper bound of a dynamic scale.
        properties: changes of the level, as in `properties.settle`.

    Returns:
        models, or (models, optimizers); each is a list if it was given as one.

    Raises:
        UsageError: an argument has a wrong type or value, or a setting is not supported.
    """
    global _state  # noqa: PLW0603, as the functions of Apex share state without an argument
    model_list = _listed("models", models, nn.Module)
    optimizer_list = [] if optimizers is None else _listed("optimizers", optimizers, Optimizer)
    given = models if optimizers is None else (models, optimizers)
    if not enabled:
        _state = _State()
        return given
    settled = settle(opt_level, properties)
    if num_losses < 1:
        raise UsageError("HT414.num-losses", num_losses=num_losses)
    for model in model_list:
        conversion.check(model)
    for optimizer in optimizer_list:
        Adopted.check(optimizer)
    device = next((p.device for m in model_list for p in m.parameters()), torch.device("cpu"))
    level = conversion.open_level(settled, device)
    for model in model_list:
        conversion.convert(model, settled, level, cast_model_outputs)
    bounds = settled.loss_scale, min_loss_scale, max_loss_scale
    scales = [Scale(device, *bounds) for _ in range(num_losses)]
    _state = _State(scales, verbosity > 0)
    if settled.masters or not scales[0].idle:
        for optimizer in optimizer_list:
            Adopted(optimizer, level)
    return given


def _listed(name: str, things: Any, kind: type) -> list[Any]:
    found = things if isinstance(things, list) else [things]
    if not all(isinstance(thing, kind) for thing in found):
        types = ", ".join(type(thing).__name__ for thing in found)
        raise UsageError(
            "HT413.wrong-type", argument=name, types=types, expected_type=kind.__name__
        )
    return found


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield a loss times its scale, and unscale the gradients at the end of the context.

    After an overflow the next step of the optimizers is skipped, and a dynamic scale is halved.

    Args:
        loss: loss, of any shape.
        optimizers: optimizers whose gradients the backward pass computes.
        loss_id: number of the loss, from 0 to `num_losses` - 1.
        model: ignored, as in Apex.
        delay_unscale: whether gradients stay scaled, for another backward pass before the step.
        delay_overflow_check: not supported.

    Raises:
        UsageError: amp or an optimizer is not initialized, or an argument is not supported.
    """
    del model
    state = _started("amp.scale_loss()")
    if not state.scales:
        yield loss
        return
    if delay_overflow_check:
        raise UsageError("HT415.delayed-overflow-check")
    if not 0 <= loss_id < len(state.scales):
        raise UsageError("HT414.loss-id", loss_id=loss_id, num_losses=len(state.scales))
    scale = state.scales[loss_id]
    chosen = optimizers if isinstance(optimizers, list) else [optimizers]
    if scale.idle and not any(hasattr(optimizer, "_amp") for optimizer in chosen):
        yield loss.float()
        return
    adopted = [Adopted.of(optimizer) for optimizer in chosen]
    for each in adopted:
        each.prepare()
    yield scale.scale(loss.float())
    for each in adopted:
        each.scaled = delay_unscale
    if delay_unscale:
        return
    for each in adopted:
        each.unscale(scale)
    overflowed = scale.overflowed()
    scale.follow()
    for each in adopted:
        each.skip |= overflowed
    if overflowed and state.verbose:
        text = "Gradient overflow.  Skipping step, loss scaler %d reducing loss scale to %g"
        logger.warning(text, loss_id, scale.get_scale())


def state_dict() -> dict[str, Any]:
    """Return `loss_scalerN` for each loss: its `loss_scale`, and `unskipped` steps since a change.

    Raises:
        UsageError: amp is not initialized.
    """
    scales = _started("amp.state_dict()").scales
    return {f"loss_scaler{number}": scale.state_dict() for number, scale in enumerate(scales)}


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load a state from this module or from Apex.

    Raises:
        UsageError: amp is not initialized, or the state is not one of amp.
    """
    scales = _started("amp.load_state_dict()").scales
    strange = [name for name in state_dict if not name.startswith("loss_scaler")]
    if strange:
        raise UsageError("HT417.wrong-keys", keys=", ".join(strange))
    if len(state_dict) != len(scales):
        logger.warning(
            "the checkpoint has the scales of %d losses, amp.initialize() got num_losses=%d",
            len(state_dict),
            len(scales),
        )
    for scale, saved in zip(scales, state_dict.values(), strict=False):
        scale.load_state_dict(saved)


def _started(call: str) -> _State:
    if _state is None:
        raise UsageError("HT413.not-initialized", call=call)
    return _state
