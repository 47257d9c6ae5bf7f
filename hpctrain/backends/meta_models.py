"""Models that were made on the meta device: with shapes and types, and without memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

__all__ = ["Unfilled", "allocate", "on_meta"]


def on_meta(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers without memory."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give memory to a model whose parameters are all on the meta device.

    Buffers that have values keep them; the other values are any. What modules share stays shared.
    """
    # `to_empty` makes a new tensor for each module that has it.
    first: dict[int, tuple[nn.Module, str]] = {}
    places = [
        (module, name, first.setdefault(id(tensor), (module, name)), tensor)
        for module in model.modules()
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(recurse=False, remove_duplicate=False)
    ]
    model.to_empty(device=device)
    for module, name, (owner, original), before in places:
        tensor = getattr(owner, original)
        setattr(module, name, tensor)
        if not before.is_meta:
            with torch.no_grad():
                tensor.copy_(before)


class Unfilled:
    """Tensors of a model that have memory, and no values yet; until then it computes nothing.

    Args:
        model: model with memory.
        names: names of the parameters and buffers without values.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._names = model, list(names)
        # A script may call a part of the model.
        self._hooks = [module.register_forward_pre_hook(self.refuse) for module in model.modules()]

    def fill(self, module: nn.Module, names: Iterable[str]) -> None:
        """Count tensors of the model, or of a part of it, as filled."""
        tensors = _tensors(module)
        filled = {id(tensors[name]) for name in names if name in tensors}
        own = _tensors(self._model)
        self._names = [name for name in self._names if id(own[name]) not in filled]
        if not self._names:
            self.close()

    def close(self) -> None:
        """Count all tensors as filled."""
        self._names.clear()
        for hook in self._hooks:
            hook.remove()

    def refuse(self, *_: Any) -> None:
        """Check that all tensors have values.

        Raises:
            UsageError: one has none.
        """
        if self._names:
            kind, names = type(self._model).__name__.removeprefix("FSDP"), self._names
            raise UsageError("HT624.no-values", kind=kind, count=len(names), name=names[0])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
