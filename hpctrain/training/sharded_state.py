"""State of a backend whose ranks each hold a part: whole in a checkpoint, divided in the ranks."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.backends.base import Backend
from hpctrain.process.pytree import map_tensors
from hpctrain.training.context import Context

__all__ = ["divide", "divided", "gathered"]


def gathered(backend: Backend, state: dict[str, Any], wanted: bool) -> dict[str, Any]:
    """Return a state with whole tensors in the memory of the host; called by all ranks.

    Each tensor leaves its device at once: a device has no room for all of them.

    Args:
        backend: backend of the session.
        state: state with this rank's parts.
        wanted: whether this rank needs the result; otherwise it has None for each tensor.
    """

    def whole(tensor: Tensor) -> Tensor | None:
        all_of_it = backend.whole(tensor)
        return all_of_it.cpu() if wanted else None

    changed: dict[str, Any] = map_tensors(whole, state)
    return changed


def divide(context: Context, state: dict[str, Any]) -> None:
    """Replace the weights and averages of a loaded state by what this rank holds of them."""
    if not context.backend.sharded:
        return
    part = context.backend.divide
    own = [model.state_dict() for model in context.models]
    averages = state["ema"]["averages"] if "ema" in state else []
    for states in (state["model"], averages):
        for values, ours in zip(states, own, strict=False):
            for name in values.keys() & ours.keys():
                values[name] = part(values[name], ours[name])


def divided(context: Context, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state of an optimizer, with what this rank holds of it."""
    if not context.backend.sharded:
        return saved
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
    own = {
        number: parameter
        for theirs, ours in groups
        for number, parameter in zip(theirs["params"], ours["params"], strict=False)
    }
    part = context.backend.divide
    state = {
        number: {
            name: part(value, own[number]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in saved["state"].items()
        if number in own
    }
    return {**saved, "state": state}
