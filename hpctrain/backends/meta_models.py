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

    Buffers that have values keep them; the other values are any. Shared parameters stay shared.
    """
    # `to_empty` makes a new parameter for each module that has it.
    first: dict[int, tuple[nn.Module, str]] = {}
    shared = [
        (module, name, first.setdefault(id(parameter), (module, name)))
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    kept = {name: tensor.clone() for name, tensor in model.named_buffers() if not tensor.is_meta}
    model.to_empty(device=device)
    for module, name, (owner, original) in shared:
        setattr(module, name, getattr(owner, original))
    buffers = dict(model.named_buffers())
    for name, values in kept.items():
        buffers[name].copy_(values)
