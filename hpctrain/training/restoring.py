"""Restoring of a run from its newest checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain import checkpoint
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training import frozen_weights, identity, plain_state, sharded_state
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.optimizer_states import fill, load_optimizers
from hpctrain.training.resume_source import Source
from hpctrain.training.state import Position

__all__ = ["Restored", "restore", "restore_from"]

_PARTS = {"model", "optimizer", "precision", "state", "position", "ranks"}


@dataclass(frozen=True, slots=True)
class Restored:
    """Contents of a checkpoint that remain after the states are loaded.

    Attributes:
        position: position at which the run continues.
        on_disk: the same, if the checkpoint is of this run; None if it is of another one.
        own: what this rank alone has: `random` states, values of the next row of metrics (`log`),
            state of the script's own loader (`stream`); empty if the number of ranks has changed.
            The run removes what it has used.
        left: states of objects that the script has not created yet, by name.
        later: functions to call before the first step; they add the groups of parameters that the
            script has not added to its optimizers until then.
    """

    position: Position
    on_disk: Position | None
    own: dict[str, Any]
    left: dict[str, Any]
    later: list[Callable[[], None]]


def restore(
    context: Context, directory: RunDirectory, others: Mapping[str, Any]
) -> Restored | None:
    """Load the newest checkpoint; called by all ranks.

    Args:
        context: context of the training.
        directory: run directory.
        others: objects that the user added to the state, by name.

    Returns:
        The contents that remain to be used; None if there is no checkpoint.

    Raises:
        UsageError: it is from another script, global batch or number of ranks.
        CheckpointError: it cannot be read, or a rank finds another one than rank 0.
    """
    source = Source(directory)
    state = _load(context, source)
    return None if state is None else _apply(context, source, others, state)


def restore_from(context: Context, source: Source, others: Mapping[str, Any]) -> Restored | None:
    """Load a checkpoint of another run, or a part of it; called by all ranks.

    Args:
        context: context of the training.
        source: the checkpoint, and what to take from it.
        others: objects that the user added to the state, by name.

    Returns:
        The contents that remain to be used; None if no checkpoint is left.

    Raises:
        UsageError, CheckpointError: as for `restore`.
    """
    state = _load(context, source)
    if state is None:
        return None
    restored = _apply(context, source, others, state)
    source.report(restored.position.step)
    place = replace(restored.position, rows=0) if source.keeps_step else Position()
    return Restored(
        place,
        None,
        restored.own if source.keeps_step else {},
        restored.left if source.what == "all" else {},
        restored.later,
    )


def _apply(
    context: Context,
    source: Source,
    others: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Restored:
    """Load the contents of a checkpoint into models, optimizers and objects."""
    position = state["position"]
    if source.keeps_step:
        _compare(context, source.directory, position)
    frozen_weights.refill(context, state["model"], position.get("left_out", ()))
    fill("model", context.models, state["model"])
    for unfilled in context.unfilled:
        unfilled.close()
    context.resumed = True
    later: list[Callable[[], None]] = []
    if source.what == "all":
        _train_again(context, position)
        later = load_optimizers(context, position, state["optimizer"])
    if position["precision"] != context.precision.name:
        logger.warning(
            "the run was in %s, and goes on in %s: --precision %s keeps it as it was",
            position["precision"],
            context.precision.name,
            position["precision"],
        )
    context.precision.load_state_dict(state["precision"])
    others, ranks = source.objects(others), [rank["values"] for rank in state["ranks"]]
    values = plain_state.of_rank(others, ranks, context.world.rank, context.world.world_size)
    for name, thing in others.items():
        if name in state["state"] and not plain_state.is_plain(thing):
            thing.load_state_dict(state["state"][name])
        elif name not in values:
            logger.warning("the checkpoint has no %s for this rank; it starts anew", name)
        elif not plain_state.fill(thing, values[name]):
            raise UsageError("HT621.object-differs", name=name, kind=type(thing).__name__)
    alike = len(state["ranks"]) == context.world.world_size
    saved = state["ranks"][context.world.rank] if alike else {}
    _fill_buffers(context.models, saved.get("buffers"))
    own = {name: saved[name] for name in ("random", "log", "stream") if name in saved}
    if not alike:
        now, before = context.world.world_size, position["world_size"]
        accumulate = context.batches.accumulate
        # Checkpoints of earlier versions do not have it; the micro-batches may be as large as then.
        earlier = position.get("accumulate", accumulate * now / before)
        own["log"] = _mean_of_logs(
            [rank.get("log", {}) for rank in state["ranks"]], accumulate / earlier
        )
    place = Position(
        position["step"],
        position["epoch"],
        position["epoch_step"],
        position["rows"],
        position["skipped"] * position["world_size"] // context.world.world_size,
    )
    kept = {**values, **state["state"]}
    left = {name: one for name, one in kept.items() if name not in others}
    return Restored(place, place, own, left, later)


def _mean_of_logs(logs: Sequence[Mapping[str, Any]], factor: float) -> dict[str, list[Any]]:
    """Return the mean of what ranks have logged for the next row, for each of other ranks.

    Args:
        logs: values of `Metrics.state_dict` of each rank.
        factor: micro-batches of a step on a rank, over those at the time of the logs.
    """
    means: dict[str, list[Any]] = {}
    for name, (_, times, tokens, *_) in ((n, [*one, None]) for n, one in logs[0].items()):
        count = max(1, round(times * factor))
        share = count / times / len(logs)
        total = share * sum(log[name][0] for log in logs)
        known = None if tokens is None else share * sum(log[name][2] for log in logs)
        means[name] = [total, count, known]
    return means


def _train_again(context: Context, position: Mapping[str, Any]) -> None:
    """Freeze and unfreeze parameters as they were in the checkpoint."""
    for model, names in zip(context.models, position["trained"], strict=True):
        trained, changed = set(names), []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)
                changed.append(name)
        if changed:
            logger.info(
                "%s and %d more parameters are %s, as in the checkpoint",
                changed[0],
                len(changed) - 1,
                "trained" if changed[0] in trained else "frozen",
            )
    # The steps that showed it may all be before the checkpoint.
    for model, unused in zip(context.models, position["unused"], strict=True):
        if unused:
            context.backend.expect_unused(model)


def _fill_buffers(models: Sequence[nn.Module], own: Sequence[Mapping[str, Tensor]] | None) -> None:
    """Load this rank's buffers; None means that the models' state already has them."""
    for model, buffers in zip(models, own or (), strict=False):
        there = dict(model.named_buffers())
        with torch.no_grad():
            for name, value in buffers.items():
                there[name].copy_(value)


def _compare(context: Context, directory: RunDirectory, position: Mapping[str, Any]) -> None:
    """Compare this start with the one that wrote the checkpoint."""
    if position["global_batch"] != context.batches.global_batch:
        batches = context.batches
        raise UsageError(
            "HT620.global-batch-differs", directory=directory, position=position, batches=batches
        )
    before, now = position["world_size"], context.world.world_size
    if before != now and not context.options.elastic:
        raise UsageError("HT620.rank-count-differs", directory=directory, before=before, now=now)


def _load(context: Context, source: Source) -> dict[str, Any] | None:
    """Load the newest checkpoint that no rank finds damaged; called by all ranks.

    Each rank reads what it needs of it.
    """
    backend, directory = context.backend, source.directory
    run = identity.of_run(directory)
    steps = on_rank_zero(backend, lambda: sorted(source.steps or checkpoint.places(directory)))
    found = checkpoint.places(directory)
    if source.steps is not None:
        found = {step: place for step, place in found.items() if step in source.steps}
    unlike = backend.gather_object(max(found, default=-1) != max(steps, default=-1))
    on_rank_zero(backend, lambda: _refuse_unlike(directory, unlike, steps))
    for step in reversed(steps):
        state, damage = None, None
        try:
            if step not in found:
                raise CheckpointError("HT707.missing-on-this-node", step=step, directory=directory)
            opened = checkpoint.open_checkpoint(found[step], step, _PARTS, run=run)
            sharded_state.divide(context, opened.state)
            state = opened.read()
        except CheckpointError as error:
            damage = error.found
        except Exception as error:  # whatever it is, the other ranks wait for this one
            damage = f"{found[step]} cannot be loaded ({type(error).__name__}: {error})"
        # One rank may find a damage in what it alone has read.
        seen = backend.gather_object(damage)
        first = on_rank_zero(backend, lambda: next(filter(None, seen), None))  # noqa: B023
        if first is None and state is not None:
            _ignore(context, directory, step, state, "ema.pt" in opened.manifest["files"])
            return state
        logger.error("%s; trying the previous one", first)
    if steps:
        on_rank_zero(backend, lambda: checkpoint.refuse_damaged(directory, len(steps)))
    return None


def _ignore(
    context: Context, directory: RunDirectory, step: int, state: Mapping[str, Any], averaged: bool
) -> None:
    """Name in the log what only earlier versions kept, and remove its learning rates.

    Args:
        context: context of the training.
        directory: run directory.
        step: step of the checkpoint.
        state: its state, changed in place.
        averaged: whether the checkpoint has a moving average of the weights.
    """
    ignored = ["moving average (session.ema)"] if averaged else []
    if on_rank_zero(context.backend, lambda: _had_schedule(directory, step)):
        ignored.append("learning rates of --lr-schedule")
        for optimizer, saved in zip(context.optimizers, state["optimizer"], strict=False):
            for number, group in enumerate(saved["param_groups"]):
                own = {"lr": group.pop("initial_lr", group["lr"])}
                if number < len(optimizer.param_groups):
                    own = optimizer.param_groups[number]
                group.update({name: own[name] for name in ("lr", "initial_lr") if name in own})
    if ignored:
        logger.info("checkpoint %s: ignored: %s", directory.checkpoint(step), ", ".join(ignored))


def _had_schedule(directory: RunDirectory, step: int) -> bool:
    """Return whether the start that wrote a checkpoint had options for a schedule."""
    starts = [line for line in directory.lines(directory.starts) if line.get("step", 0) < step]
    options = (starts[-1].get("options") or {}) if starts else {}
    warmup = options.get("lr_warmup_epochs") or options.get("lr_warmup_steps")
    return bool(warmup) or options.get("lr_schedule", "constant") != "constant"


def _refuse_unlike(directory: RunDirectory, unlike: Sequence[bool], steps: Sequence[int]) -> None:
    """Raise an error if ranks do not find the newest checkpoint that rank 0 finds."""
    values = {"directory": directory, "unlike": sum(unlike), "world_size": len(unlike)}
    if any(unlike) and steps:
        raise CheckpointError("HT622.checkpoint-differs", step=steps[-1], **values)
    if any(unlike):
        raise CheckpointError("HT622.checkpoint-not-on-rank-0", **values)
