"""State in a checkpoint: everything that determines the next step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain import checkpoint
from hpctrain.errors import CheckpointError, NonFiniteError, UsageError
from hpctrain.optim import scheduled
from hpctrain.process import random_states
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training import identity, plain_state, sharded_state
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.memory_copies import MemoryCopies

__all__ = [
    "LaterGroups",
    "Position",
    "Restored",
    "gather",
    "refuse_nonfinite",
    "refuse_stateless",
    "refuse_streak",
    "restore",
]


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its loop.

    Attributes:
        step: number of optimizer steps done.
        epoch: index of the current epoch, from 0.
        epoch_step: number of steps done in this epoch.
        rows: number of rows of metrics written.
        skipped: micro-batches of this epoch on each rank that belong to no step.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    rows: int = 0
    skipped: int = 0

    def batches(self, accumulate: int) -> int:
        """Return the number of micro-batches of the epoch that are done on each rank.

        Args:
            accumulate: micro-batches of a step on one rank.
        """
        return self.epoch_step * accumulate + self.skipped


@dataclass(frozen=True, slots=True)
class Restored:
    """Contents of a checkpoint that remain after the states are loaded.

    Attributes:
        position: position at which the run continues.
        on_disk: newest position on the disk, or one with its step; None if it is not older than
            a copy in memory, or if there is none.
        random: random states of this rank; None if the number of ranks has changed.
        log: values of this rank for the next row of metrics; None as for `random`.
        stream: state of the script's own loader on this rank, if it has one; None as for `random`.
        left: states of objects that the script has not created yet, by name.
        later: groups of parameters that the script has not added to its optimizers yet.
    """

    position: Position
    on_disk: Position | None
    random: dict[str, Any] | None
    log: dict[str, Any] | None
    stream: Any
    left: dict[str, Any]
    later: "list[LaterGroups]"


def refuse_stateless(others: Mapping[str, Any]) -> None:
    """Refuse objects that a checkpoint cannot hold, or that a resume cannot fill in place.

    Raises:
        UsageError: an object is not plain, and has no `state_dict()` or no `load_state_dict()`; or
            a plain one holds something that a checkpoint cannot hold.
    """
    for name, thing in others.items():
        if plain_state.is_plain(thing):
            checkpoint.freeze({name: plain_state.copied(thing)})
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            value = repr(thing) if isinstance(thing, (int, float, str, NoneType)) else "…"
            raise UsageError(
                "HT616",
                f'session.run(state={{"{name}": …}}) with a {type(thing).__name__}',
                "what a resume can fill in place: a dict, list, tensor, random number generator, "
                "or something with state_dict() and load_state_dict()",
                f'mine = {{"{name}": {value}}}, and session.run(state={{"mine": mine}})',
                "a class of your own with both methods",
            )


def refuse_nonfinite(context: Context, step: int) -> None:
    """Refuse weights that are not worth saving; the result is the same on all ranks.

    Raises:
        NonFiniteError: the weights are no longer finite.
    """
    backend = context.backend
    weights = [
        backend.own_part(parameter.detach())
        for model in context.models
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    finite = not weights or bool(torch.stack([one.isfinite().all() for one in weights]).all())
    if backend.sharded:  # other parts may be finite
        unlike = torch.tensor(int(not finite), device=context.device)
        finite = int(backend.sum(unlike).item()) == 0
    if not finite:
        error = NonFiniteError(
            "HT613",
            f"the weights are not finite any more at step {step}, so they are not kept",
            "finite losses and gradients",
            "--resume, with a lower --lr, --lr-warmup-epochs, --clip-norm or --precision fp32; "
            "it goes on from the checkpoint before",
        )
        error.reported_by_rank_0 = context.world.rank > 0
        raise error


def refuse_streak(context: Context, ranks: float, step: int, saved: Position | None) -> None:
    """End a run with too many steps in a row without finite numbers; called by all ranks.

    Args:
        context: context of the training.
        ranks: number of ranks that have reached `--max-nonfinite`.
        step: step of the run.
        saved: position from which a later start would continue.

    Raises:
        NonFiniteError: always.
    """
    most = context.options.max_nonfinite
    error = NonFiniteError(
        "HT613",
        f"{most} steps in a row overflowed or had no finite loss, "
        f"on {ranks:.0f} of {context.world.world_size} ranks, before step {step}",
        f"fewer in a row (--max-nonfinite {most})",
        "--resume, with a lower --lr, --lr-warmup-epochs, --clip-norm or --precision bf16; "
        f"it goes on from step {saved.step if saved else 0}",
    )
    error.reported_by_rank_0 = context.world.rank > 0
    raise error


def gather(
    context: Context,
    others: Mapping[str, Any],
    position: Position,
    log: Mapping[str, Any],
    on_each_host: bool = False,
) -> dict[str, Any]:
    """Collect the state of a session, part by part; called by all ranks.

    Args:
        context: context of the training.
        others: objects that the user added to the state, by name.
        position: position of the run.
        log: values of this rank for the next row of metrics.
        on_each_host: whether all ranks get what rank 0 alone knows.

    Returns:
        The state, with this rank's part of each tensor. Without `on_each_host`, other ranks than 0
        have only parameters, optimizer states and averages that are right for all.
    """
    values = {
        name: plain_state.copied(one) for name, one in others.items() if plain_state.is_plain(one)
    }
    own = {**_of_this_rank(context), "log": dict(log), "values": values}
    if context.stream is not None:
        own["stream"] = context.stream.state_at(position.batches(context.batches.accumulate))
    ranks = context.backend.gather_object(own)
    first: list[dict[str, Tensor]] = []
    small: dict[str, Any] = {}
    if context.world.rank == 0:
        small = _of_rank_0(context, others, position, ranks)
        first, ranks[0]["buffers"] = ranks[0]["buffers"], []
    if on_each_host:
        first, small = context.backend.broadcast_object((first, small))
    models = [model.state_dict() for model in context.models]
    if on_each_host and context.world.rank > 0:
        for model, buffers in zip(models, first, strict=True):
            model.update(buffers)  # those of this rank may differ
    state = {
        "model": models,
        "optimizer": [optimizer.state_dict() for optimizer in context.optimizers],
        **small,
    }
    if context.ema is not None:
        state["ema"] = context.ema.state_dict()
    return state


def _of_rank_0(
    context: Context,
    others: Mapping[str, Any],
    position: Position,
    ranks: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the parts of the state that only rank 0 knows, or that may differ between ranks.

    Args:
        context, others, position: as for `gather`.
        ranks: what each rank has of its own.
    """
    for one in ranks[1:]:
        if _equal(one["buffers"], ranks[0]["buffers"]):
            one["buffers"] = None  # the model's state has the same
    plain = ranks[0]["values"]
    return {
        "precision": context.precision.state_dict(),
        "state": {name: one.state_dict() for name, one in others.items() if name not in plain},
        "position": {
            **asdict(position),
            "global_batch": context.batches.global_batch,
            "world_size": context.world.world_size,
            "precision": context.precision.name,
            "trained": [
                [name for name, parameter in model.named_parameters() if parameter.requires_grad]
                for model in context.models
            ],
            "unused": [context.backend.has_unused(model) for model in context.models],
            "groups": [
                sharded_state.names_of_groups(context, optimizer)
                for optimizer in context.optimizers
            ],
        },
        "ranks": ranks,
    }


def _of_this_rank(context: Context) -> dict[str, Any]:
    """Return what differs between ranks: random states, and statistics of their micro-batches."""
    buffers: list[dict[str, Tensor]] = []
    if context.world.world_size > 1:
        for model in context.models:
            kept = model.state_dict().keys()
            own = {name: buffer for name, buffer in model.named_buffers() if name in kept}
            buffers.append({name: buffer.detach().cpu() for name, buffer in own.items()})
    return {"random": random_states.capture(context.device), "buffers": buffers}


def _equal(some: Sequence[Mapping[str, Tensor]], others: Sequence[Mapping[str, Tensor]]) -> bool:
    return all(
        torch.equal(tensor, other[name])
        for one, other in zip(some, others, strict=True)
        for name, tensor in one.items()
    )


def restore(
    context: Context,
    directory: RunDirectory,
    others: Mapping[str, Any],
    memory: MemoryCopies | None = None,
) -> Restored | None:
    """Load the newest checkpoint, of those on the disk and in memory; called by all ranks.

    Args:
        context: context of the training.
        directory: run directory.
        others: objects that the user added to the state, by name.
        memory: copies in memory; None without them.

    Returns:
        The contents that remain to be used; None if there is no checkpoint.

    Raises:
        UsageError: it is from another script, global batch or number of ranks.
        CheckpointError: it cannot be read, or a rank finds another one than rank 0.
    """
    if memory is None:
        loaded, older = _load(context, directory), None
    else:
        loaded, older = _load_newest(context, directory, memory)
    if loaded is None:
        return None
    step, state = loaded
    position = state["position"]
    _compare(context, directory, position)
    _fill("model", context.models, state["model"])
    _train_again(context, position)
    rates = _rates(context)
    later = _later_groups(context, position, state["optimizer"])
    states = [later[n].first if n in later else one for n, one in enumerate(state["optimizer"])]
    _fill("optimizer", context.optimizers, states)
    course = context.options.sets_rates or any(map(scheduled, context.optimizers))
    if rates != _rates(context) and not course:
        logger.warning(
            "the learning rate is that of the checkpoint, %s, not that of this start, %s",
            _rates(context),
            rates,
        )
    if position["precision"] != context.precision.name:
        logger.warning(
            "the run was in %s, and goes on in %s: --precision %s keeps it as it was",
            position["precision"],
            context.precision.name,
            position["precision"],
        )
    context.precision.load_state_dict(state["precision"])
    if context.ema is not None and "ema" in state:
        context.ema.load_state_dict(state["ema"])
    elif context.ema is not None:
        logger.warning("the checkpoint has no average of the weights; it starts anew from them")
        context.ema.restart()
    ranks = [rank.get("values", {}) for rank in state["ranks"]]
    values = plain_state.of_rank(others, ranks, context.world.rank, context.world.world_size)
    for name, thing in others.items():
        if name in state["state"] and not plain_state.is_plain(thing):
            thing.load_state_dict(state["state"][name])
        elif name not in values:
            logger.warning("the checkpoint has no %s for this rank; it starts anew", name)
        elif not plain_state.fill(thing, values[name]):
            raise UsageError(
                "HT621",
                f"the checkpoint's {name} does not fit the {type(thing).__name__} of the script",
                "the same kind, and the same shape of a tensor",
                "--run-dir DIR for another directory",
            )
    random = log = stream = None
    if len(state["ranks"]) == context.world.world_size:
        own = state["ranks"][context.world.rank]
        random, log, stream = own["random"], own.get("log"), own.get("stream")
        _fill_buffers(context.models, own["buffers"])
    place = Position(
        position["step"],
        position["epoch"],
        position["epoch_step"],
        position["rows"],
        position.get("skipped", 0) * position["world_size"] // context.world.world_size,
    )
    kept = {**values, **state["state"]}
    left = {name: one for name, one in kept.items() if name not in others}
    on_disk = place if older is None else Position(older) if 0 <= older < step else None
    return Restored(place, on_disk, random, log, stream, left, list(later.values()))


class LaterGroups:
    """Groups that `add_param_group` added to an optimizer during training, as for unfrozen layers.

    A script that resumes may add them again, or may already be past the place where it did.

    Args:
        context: context of the training.
        optimizer: optimizer that has only the first groups.
        saved: complete saved state of the optimizer.
        names: for each group, the model index and name of its parameters.

    Attributes:
        optimizer: optimizer as given.
        first: saved state of the groups that the optimizer has.
    """

    def __init__(
        self,
        context: Context,
        optimizer: Optimizer,
        saved: dict[str, Any],
        names: Sequence[Sequence[tuple[int, str]]],
    ) -> None:
        self._parts, self.optimizer, self._saved, self._names = context, optimizer, saved, names
        groups = saved["param_groups"][: len(optimizer.param_groups)]
        kept = {number for group in groups for number in group["params"]}
        state = {number: one for number, one in saved["state"].items() if number in kept}
        self.first = {**saved, "state": state, "param_groups": groups}

    def take_up(self) -> None:
        """Add the groups that are still missing, and load all; called before the first step."""
        there = len(self.optimizer.param_groups)
        for group, names in zip(
            self._saved["param_groups"][there:], self._names[there:], strict=True
        ):
            models = [dict(model.named_parameters()) for model in self._parts.models]
            own = [self._parts.precision.master(models[n][name]) for n, name in names]
            self.optimizer.add_param_group({**group, "params": own})
            logger.info("%d parameters that were added to the optimizer are again", len(own))
        self.optimizer.load_state_dict(self._saved)


def _later_groups(
    context: Context, position: Mapping[str, Any], states: Sequence[dict[str, Any]]
) -> dict[int, LaterGroups]:
    """Return the groups that optimizers have only in the checkpoint, by index of the optimizer."""
    names = position.get("groups", [])
    return {
        number: LaterGroups(context, optimizer, saved, names[number])
        for number, (optimizer, saved) in enumerate(zip(context.optimizers, states, strict=False))
        if number < len(names) and len(saved["param_groups"]) > len(optimizer.param_groups)
    }


def _train_again(context: Context, position: Mapping[str, Any]) -> None:
    """Freeze and unfreeze parameters as they were in the checkpoint."""
    for model, names in zip(context.models, position.get("trained", ()), strict=False):
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
    for model, unused in zip(context.models, position.get("unused", ()), strict=False):
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
        raise UsageError(
            "HT620",
            f"the run in {directory.path} has a global batch of "
            f"{position['global_batch']}, this start one of {context.batches.global_batch}",
            "the same global batch, so that its samples go on where they stopped",
            f"--global-batch {position['global_batch']}",
        )
    before, now = position["world_size"], context.world.world_size
    if before != now and not context.options.elastic:
        raise UsageError(
            "HT620",
            f"the run in {directory.path} has {before} ranks, this start {now}",
            "as many ranks again, so that its sums have the same order",
            f"start {before} ranks",
            f"--elastic, to go on with {now}",
        )


def _rates(context: Context) -> str:
    """Format the learning rates of all groups, for comparison and messages."""
    groups = [group for optimizer in context.optimizers for group in optimizer.param_groups]
    return ", ".join(f"{float(group['lr']):.6g}" for group in groups)


def _fill(kind: str, things: Sequence[Any], states: Sequence[Any]) -> None:
    """Load the state of each object."""
    if len(states) != len(things):
        raise UsageError(
            "HT621",
            f"the checkpoint has {len(states)} {kind}s, the script prepared {len(things)}",
            "the same script",
            "--run-dir DIR for another directory",
        )
    for thing, state in zip(things, states, strict=True):
        try:
            thing.load_state_dict(state)
        except ValueError as error:  # from an optimizer with other parameter groups
            raise UsageError(
                "HT621",
                f"the checkpoint's {kind} does not fit that of the script: {error}",
                "the same script, and the same --decay",
                "--run-dir DIR for another directory",
            ) from None


def _load_newest(
    context: Context, directory: RunDirectory, memory: MemoryCopies
) -> tuple[tuple[int, dict[str, Any]] | None, int | None]:
    """Load the newest state; of two of the same step that in memory.

    Returns:
        Step and state, or None; and the step of the newest checkpoint on the disk (-1 for none) if
        the state is not from there.
    """
    loaded, copy = None, memory.newest()
    newest = on_rank_zero(context.backend, lambda: max(directory.steps(), default=-1))
    if copy is None or newest > copy.step:
        try:
            loaded = _load(context, directory)
        except CheckpointError:
            if copy is None:
                raise
    if copy is None or (loaded is not None and loaded[0] > copy.step):
        memory.keep_only(None)
        return loaded, None
    state = memory.state(copy)
    sharded_state.joined(context, state)
    memory.keep_only(copy.step)
    logger.info("the state of step %d is from the memory of the hosts", copy.step)
    return (copy.step, state), newest if loaded is None else loaded[0]


def _load(context: Context, directory: RunDirectory) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that no rank finds damaged; called by all ranks.

    Each rank reads what it needs of it.
    """
    backend, run = context.backend, identity.facts(directory, context.world)["run"]
    steps = on_rank_zero(backend, lambda: sorted(checkpoint.places(directory)))
    found = checkpoint.places(directory)
    unlike = backend.gather_object(max(found, default=-1) != max(steps, default=-1))
    on_rank_zero(backend, lambda: _refuse_unlike(directory, unlike, steps))
    for step in reversed(steps):
        state, damage = None, None
        try:
            if step not in found:
                raise CheckpointError("HT707", f"no step {step} in {directory.checkpoints} here")
            opened = checkpoint.open_checkpoint(found[step], step, run=run)
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
            return step, state
        logger.error("%s; trying the previous one", first)
    if steps:
        on_rank_zero(backend, lambda: checkpoint.refuse_damaged(directory, len(steps)))
    return None


def _refuse_unlike(directory: RunDirectory, unlike: Sequence[bool], steps: Sequence[int]) -> None:
    """Raise an error if ranks do not find the newest checkpoint that rank 0 finds."""
    if any(unlike):
        raise CheckpointError(
            "HT622",
            f"{sum(unlike)} of {len(unlike)} ranks do not find in "
            f"{directory.path} the checkpoint that rank 0 finds"
            + (f" (step {steps[-1]})" if steps else " (none)"),
            "a run directory on a file system that all hosts share",
            "--run-dir DIR",
        )
