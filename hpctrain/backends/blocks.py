"""Blocks of a model: the parts whose weights are gathered and freed together."""

from collections.abc import Iterator

from torch import nn

from hpctrain.errors import UsageError

__all__ = ["find_blocks"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHOWN = 8


def find_blocks(model: nn.Module, names: str | None) -> list[nn.Module]:
    """Return the blocks of a model, in the order of its modules.

    Args:
        model: model as the script created it.
        names: names of their classes, with + between them. Without them, the blocks are what a
            container (`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`) has at least twice of one
            class, as the layers of a transformer or the residual blocks of a stage; the outermost
            ones count.

    Returns:
        The blocks; empty if the model repeats no part, so that it is one block as a whole.

    Raises:
        UsageError: the model has no module of a named class.
    """
    if names is None:
        return list(_repeated(model))
    wanted = [name.strip() for name in names.split("+") if name.strip()]
    there = {type(module).__name__ for module in model.modules()}
    missing = [name for name in wanted or [names] if name not in there]
    if missing:
        kind = type(model).__name__
        own = sorted(there - {kind.__name__ for kind in _CONTAINERS} - {kind})
        classes = ", ".join(own[:_SHOWN])
        raise UsageError(
            "HT319.no-such-block", names=names, model=kind, missing=missing[0], classes=classes
        )
    return [module for module in model.modules() if type(module).__name__ in wanted]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    for child in children:
        alike = sum(type(one) is type(child) for one in children)
        is_block = (
            isinstance(module, _CONTAINERS)
            and alike > 1
            and not isinstance(child, _CONTAINERS)
            and any(True for _ in child.parameters())
        )
        if is_block:
            yield child
        else:
            yield from _repeated(child)
