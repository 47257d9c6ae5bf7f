"""Optimizer states of a checkpoint, loaded by the names of their parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.training import sharded_state
from hpctrain.training.context import Context
from hpctrain.training.schedulers import scheduled

__all__ = ["fill", "load_optimizers"]


def load_optimizers(
    context: Context, position: Mapping[str, Any], states: Sequence[dict[str, Any]]
) -> list[Callable[[], None]]:
    """Load the saved states of all optimizers.

    Args:
        context: context of the training.
        position: position in the checkpoint, with the names of the parameters; changed in place.
        states: saved states of the optimizers; changed in place.

    Returns:
        Functions to call before the first step. They add the groups of parameters that the script
        has not added to its optimizers until then.

    Raises:
        UsageError: the optimizers differ in number, class or groups.
    """
    rates, settings = _rates(context), [_settings(one) for one in context.optimizers]
    _refuse_other_kinds(context, position)
    _align(context, position, states)
    context.rates_loaded = [one for one in context.optimizers if not scheduled(one)]
    first, later = _split_groups(context, position, states)
    fill("optimizer", context.optimizers, first)
    if rates != _rates(context) and len(context.rates_loaded) == len(context.optimizers):
        logger.warning(
            "the learning rate is that of the checkpoint, %s, not that of this start, %s",
            _rates(context),
            rates,
        )
    for optimizer, before in zip(context.optimizers, settings, strict=True):
        _name_changes(optimizer, before)
    return later


def fill(kind: str, things: Sequence[Any], states: Sequence[Any]) -> None:
    """Load the state of each object.

    Raises:
        UsageError: there is another number of them, or one does not fit.
    """
    if len(states) != len(things):
        raise UsageError("HT621.count-differs", kind=kind, saved=len(states), prepared=len(things))
    for thing, state in zip(things, states, strict=True):
        try:
            thing.load_state_dict(state)
        except ValueError as error:  # from an optimizer with other parameter groups
            raise UsageError("HT621.state-not-loadable", kind=kind, error=error) from None


def _refuse_other_kinds(context: Context, position: Mapping[str, Any]) -> None:
    """Refuse optimizers of other classes than those of the checkpoint."""
    saved = position.get("optimizers")  # checkpoints of earlier versions have no classes
    kinds = [type(optimizer).__name__ for optimizer in context.optimizers]
    if saved is not None and len(saved) == len(kinds) and saved != kinds:
        raise UsageError(
            "HT621.other-optimizer", saved=" and ".join(saved), kinds=" and ".join(kinds)
        )


def _align(context: Context, position: Mapping[str, Any], states: Sequence[dict[str, Any]]) -> None:
    """Bring saved optimizer states into the order of the groups and parameters of this script.

    torch loads them by their place, so states would go to other parameters of equal shapes.

    Args:
        context: context of the training.
        position: position in the checkpoint, with the names of the parameters; changed in place.
        states: saved states of the optimizers; changed in place.

    Raises:
        UsageError: groups of equal sizes have other parameters.
    """
    for optimizer, saved, names in zip(
        context.optimizers, states, position["groups"], strict=False
    ):
        groups, left = saved["param_groups"], list(range(len(names)))
        order: list[int] = []
        for local in sharded_state.names_of_groups(context, optimizer):
            same = [n for n in left if sorted(map(tuple, names[n])) == sorted(local)]
            if not same:
                break
            numbers = dict(zip(map(tuple, names[same[0]]), groups[same[0]]["params"], strict=True))
            groups[same[0]]["params"] = [numbers[name] for name in local]
            names[same[0]] = local
            order.append(same[0])
            left.remove(same[0])
        else:
            saved["param_groups"] = [groups[n] for n in (*order, *left)]
            names[:] = [names[n] for n in (*order, *left)]
            continue
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes == [len(group["params"]) for group in groups[: len(sizes)]]:
            raise UsageError("HT621.groups-differ", kind=type(optimizer).__name__)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of an optimizer, without what schedulers change."""
    moved = {"lr", *({"momentum", "betas"} if scheduled(optimizer) else ())}
    names = [name for name in optimizer.defaults if name not in moved]
    return [
        # SparseAdam has defaults that its groups lack.
        {n: group[n] for n in names if n in group and not isinstance(group[n], Tensor)}
        for group in optimizer.param_groups
    ]


def _name_changes(optimizer: Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Name in the log the settings of the checkpoint that differ from those of this script."""
    changed = [
        f"{name}={saved[name]} (here {value})"
        for saved, local in zip(_settings(optimizer), before, strict=False)
        for name, value in local.items()
        if name in saved and saved[name] != value
    ]
    if changed:
        logger.warning(
            "the %s keeps the settings of the checkpoint: %s",
            type(optimizer).__name__,
            ", ".join(dict.fromkeys(changed)),
        )


def _split_groups(
    context: Context, position: Mapping[str, Any], states: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Callable[[], None]]]:
    """Return what each optimizer can load, and functions that add the groups which it lacks.

    `add_param_group` may have added groups during training, as for unfrozen layers. A script that
    resumes may add them again, or may already be past the place where it did.
    """
    first = list(states)
    later: list[Callable[[], None]] = []
    saved_of = zip(context.optimizers, states, position["groups"], strict=False)
    for number, (optimizer, saved, names) in enumerate(saved_of):
        there = len(optimizer.param_groups)
        if len(saved["param_groups"]) > there:
            groups = saved["param_groups"][:there]
            kept = {index for group in groups for index in group["params"]}
            state = {index: one for index, one in saved["state"].items() if index in kept}
            first[number] = {**saved, "state": state, "param_groups": groups}
            later.append(partial(_add_groups, context, optimizer, saved, names))
    return first, later


def _add_groups(
    context: Context,
    optimizer: Optimizer,
    saved: dict[str, Any],
    names: Sequence[Sequence[tuple[int, str]]],
) -> None:
    """Add the groups that are still missing, and load all.

    Args:
        context: context of the training.
        optimizer: optimizer with the first groups, or with all.
        saved: complete saved state of the optimizer.
        names: for each group, the model index and name of its parameters.
    """
    there = len(optimizer.param_groups)
    models = [dict(model.named_parameters()) for model in context.models]
    for group, added in zip(saved["param_groups"][there:], names[there:], strict=True):
        own = [context.precision.master(models[n][name]) for n, name in added]
        optimizer.add_param_group({**group, "params": own})
        logger.info("%d parameters that were added to the optimizer are again", len(own))
    optimizer.load_state_dict(saved)


def _rates(context: Context) -> str:
    """Format the learning rates of all groups, for comparison and messages."""
    groups = [group for optimizer in context.optimizers for group in optimizer.param_groups]
    return ", ".join(f"{float(group['lr']):.6g}" for group in groups)
