"""Weight decay for weights only, without norms and biases."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["split"]

# Batch norms of all kinds, synchronised ones too, and instance norms are _NormBase.
# nn.LocalResponseNorm has no parameters.
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def split(optimizer: Optimizer, models: Iterable[nn.Module]) -> int:
    """Remove weight decay from norms and biases, in place.

    Each group with weight decay is split in two: one that keeps it, directly followed by one with
    `weight_decay=0` and the same other settings. Neither is ever empty. The order of the parameters
    in each group and the optimizer's state stay unchanged. A second call changes nothing.

    Norms are the parameters of torch's norm modules and of their subclasses. Biases are parameters
    whose name in any module ends in `bias` or begins with `bias_` (those of recurrent layers).
    Parameters that are in none of the models count as norms or biases if they have 0 or 1
    dimensions. A shared parameter loses its decay if any of its uses is in a norm or as a bias.

    Args:
        optimizer: optimizer with `weight_decay` in its groups; other optimizers stay unchanged.
        models: models with the optimizer's parameters.

    Returns:
        Number of parameter tensors that lost their decay.

    Source: Goyal et al. 2017, arXiv 1706.02677, section 5.1, for norms; He et al. 2019, arXiv
    1812.01187, section 3.1 ("no bias decay"), for both.
    """
    exempt = _exempt(models)
    lost = 0
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.append(group)
        if not group.get("weight_decay"):
            continue
        free = [exempt.get(p, p.dim() <= 1) for p in group["params"]]
        lost += sum(free)
        if all(free):
            group["weight_decay"] = 0.0
        elif any(free):
            groups.append(_without_decay(group, free))
            group.update(_chosen(group, [not exempted for exempted in free]))
    optimizer.param_groups[:] = groups
    return lost


def _exempt(models: Iterable[nn.Module]) -> dict[Tensor, bool]:
    """Return, for each parameter of the models, whether it belongs to a norm or is a bias."""
    exempt: dict[Tensor, bool] = {}
    for model in models:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                is_bias = name.endswith("bias") or name.startswith("bias_")
                already = exempt.get(parameter, False)
                exempt[parameter] = already or is_bias or isinstance(module, _NORMS)
    return exempt


def _without_decay(group: dict[str, Any], free: list[bool]) -> dict[str, Any]:
    """Return a group without decay, with a group's other settings and its `free` parameters."""
    settings = {
        # A learning rate that is a tensor is changed in place, so each group needs its own.
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
    }
    return {**settings, **_chosen(group, free), "weight_decay": 0.0}


def _chosen(group: dict[str, Any], chosen: list[bool]) -> dict[str, list[Any]]:
    """Return the chosen parameters of a group, and their names if the group has names."""
    return {
        name: [entry for entry, take in zip(group[name], chosen, strict=True) if take]
        for name in ("params", "param_names")
        if name in group
    }
