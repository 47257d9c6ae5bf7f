"""Models that were made on the meta device: with shapes and types, and without memory."""

import torch
from torch import nn

__all__ = ["allocate", "on_meta"]


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
