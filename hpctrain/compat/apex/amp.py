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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.compat.apex import model_conversion as conversion
from hpctrain.compat.apex.adopted import Adopted
from hpctrain.compat.apex.properties import settle
from hpctrain.compat.apex.scale import Scale
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]


class _State:
    """State that `initialize` keeps for the other functions.

    Attributes:
        scales: scale of each loss; empty if amp is not enabled.
        verbose: whether overflows are logged.
    """

    def __init__(self, scales: Sequence[Scale], verbose: bool) -> None:
        self.scales = scales
        self.verbose = verbose

    def scale(self, loss_id: int) -> Scale:
        """Return the scale of a loss.

        Raises:
            UsageError: there is no such loss.
        """
        if not 0 <= loss_id < len(self.scales):
            raise UsageError(
                "HT414",
                f"amp.scale_loss(…, loss_id={loss_id})",
                f"a number below num_losses, which is {len(self.scales)}",
                f"amp.initialize(…, num_losses={loss_id + 1})",
            )
        return self.scales[loss_id]


_state: _State | None = None


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Convert models and optimizers to a precision, before the models are wrapped.

    Args:
        models: models on their device, in fp32; models and optimizers are changed in place.
        optimizers: optimizers of the models' parameters; None for inference.
        enabled: False to change nothing, here and in the other functions.
        opt_level: level from O0 to O3.
        cast_model_type: type of the weights; None or the type of the level.
        patch_torch_functions: False to run O1 without half precision.
        keep_batchnorm_fp32: whether O2 and O3 keep batch norm in fp32; also "True" or "False".
        master_weights: whether O2 and O3 keep fp32 master weights.
        loss_scale: a number, also as text, or "dynamic"; None for the default of the level.
        cast_model_outputs: type of all outputs of the models; None for fp32.
        num_losses: number of losses, each with its own scale.
        verbosity: 0 to log no overflows.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.

    Returns:
        models, or (models, optimizers); each is a list if it was given as one.

    Raises:
        UsageError: an argument has a wrong type or value, or a setting is not supported.
    """
    global _state  # noqa: PLW0603, as the functions of Apex share state without an argument
    model_list = _listed("models", models, nn.Module)
    optimizer_list = [] if optimizers is None else _listed("optimizers", optimizers, Optimizer)
    if not enabled:
        _state = _State((), False)
        return models if optimizers is None else (models, optimizers)
    properties = settle(
        opt_level,
        cast_model_type,
        patch_torch_functions,
        keep_batchnorm_fp32,
        master_weights,
        loss_scale,
    )
    if num_losses < 1:
        raise UsageError(
            "HT414", f"amp.initialize(…, num_losses={num_losses})", "1 or more", "num_losses=1"
        )
    for model in model_list:
        conversion.check(model)
    for optimizer in optimizer_list:
        Adopted.check(optimizer)
    device = _device(model_list)
    level = conversion.open_level(properties, device)
    for model in model_list:
        conversion.convert(model, properties, level, cast_model_outputs)
    scales = [
        Scale(device, properties.loss_scale, min_loss_scale, max_loss_scale)
        for _ in range(num_losses)
    ]
    _state = _State(scales, verbosity > 0)
    if properties.masters or not scales[0].idle:
        for optimizer in optimizer_list:
            Adopted(optimizer, level)
    return models if optimizers is None else (models, optimizers)


def _listed(name: str, things: Any, kind: type) -> list[Any]:
    found = things if isinstance(things, list) else [things]
    if not all(isinstance(thing, kind) for thing in found):
        raise UsageError(
            "HT413",
            f"amp.initialize() got {name} of {', '.join(type(t).__name__ for t in found)}",
            f"a {kind.__name__}, or a list of them",
            "amp.initialize(model, optimizer, opt_level=…)",
        )
    return found


def _device(models: Sequence[nn.Module]) -> torch.device:
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


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
        raise UsageError(
            "HT415",
            "amp.scale_loss(…, delay_overflow_check=True)",
            "an overflow check before each step",
            "leave delay_overflow_check out",
        )
    scale = state.scale(loss_id)
    chosen = optimizers if isinstance(optimizers, list) else [optimizers]
    if scale.idle and not any(hasattr(optimizer, "_amp") for optimizer in chosen):
        yield loss.float()
        return
    adopted = [Adopted.of(optimizer) for optimizer in chosen]
    for each in adopted:
        each.prepare()
    yield scale.scale(loss.float())
    if delay_unscale:
        for each in adopted:
            each.scaled = True
        return
    for each in adopted:
        each.unscale(scale)
    overflowed = scale.overflowed()
    scale.follow()
    if not overflowed:
        return
    for each in adopted:
        each.skip = True
    if state.verbose:
        text = "Gradient overflow.  Skipping step, loss scaler %d reducing loss scale to %g"
        logger.warning(text, loss_id, scale.get_scale())


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the parameters that an optimizer updates, for instance to clip gradients."""
    for group in optimizer.param_groups:
        yield from group["params"]


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
        raise UsageError(
            "HT417",
            f"amp.load_state_dict() got {', '.join(strange)}",
            "loss_scaler0, loss_scaler1, …, as amp.state_dict() gives them",
            'amp.load_state_dict(checkpoint["amp"])',
        )
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
        raise UsageError(
            "HT413",
            f"{call} before amp.initialize()",
            "models and optimizers from amp.initialize()",
            "model, optimizer = amp.initialize(model, optimizer, opt_level=…)",
        )
    return _state
