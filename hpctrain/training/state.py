"""State in a checkpoint: everything that determines the next step."""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hpctrain import checkpoint
from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import NonFiniteError, UsageError
from hpctrain.process import random_states
from hpctrain.process.logging import logger
from hpctrain.process.pytree import map_tensors
from hpctrain.training import frozen_weights, plain_state, sharded_state
from hpctrain.training.context import Context

__all__ = [
    "Position",
    "gather",
    "refuse_nonfinite",
    "refuse_stateless",
    "refuse_streak",
    "warn_of_unlike",
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


def refuse_stateless(others: Mapping[str, Any]) -> None:
    """Refuse objects that a checkpoint cannot hold, or that a resume cannot fill in place.

    Raises:
        UsageError: an object is not plain, and has no `state_dict()` or no `load_state_dict()`; or
            a plain one holds something that a checkpoint cannot hold; or an average of weights is
            in half precision.
    """
    for name, thing in others.items():
        if isinstance(thing, AveragedModel):
            if any(one.dtype == torch.float16 for one in thing.parameters()):
                raise UsageError("HT404.half-average", name=name)
            continue
        if plain_state.is_plain(thing):
            checkpoint.freeze({name: plain_state.copied(thing)})
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            value = repr(thing) if isinstance(thing, (int, float, str, NoneType)) else "…"
            raise UsageError(
                "HT616.object-cannot-be-restored", name=name, kind=type(thing).__name__, value=value
            )


def warn_of_unlike(context: Context, others: Mapping[str, Any]) -> None:
    """Log the objects whose states differ between the ranks: a checkpoint has that of rank 0.

    Called by all ranks. Large tensors and modules are not compared.
    """
    digests = {}
    for name, thing in others.items():
        if not plain_state.is_plain(thing) and not isinstance(thing, nn.Module):
            # Whatever an object raises, the save itself will raise again.
            with suppress(Exception):
                state = map_tensors(_content, thing.state_dict())
                digests[name] = hashlib.sha256(pickle.dumps(state)).hexdigest()
    seen = context.backend.gather_object(digests)
    if context.world.rank == 0:
        for name, digest in digests.items():
            ranks = [rank for rank, one in enumerate(seen) if one.get(name, digest) != digest]
            if ranks:
                logger.warning(
                    "%s has another state on %s than on rank 0, and checkpoints have that of rank "
                    "0; a dict, a list or a generator in state= is kept for each rank",
                    name,
                    ranks_text(ranks),
                )


def _content(tensor: Tensor) -> Any:
    """Return the values of a small plain tensor, and the shape of any other one."""
    small = type(tensor) is Tensor and tensor.numel() <= _LARGEST_COMPARED
    return tensor.tolist() if small else tuple(tensor.shape)


_LARGEST_COMPARED = 2**16


def refuse_nonfinite(context: Context, step: int) -> None:
    """Refuse weights that are not worth saving; the result is the same on all ranks.

    Raises:
        NonFiniteError: the weights are no longer finite.
    """
    backend = context.backend
    weights = [
        backend.held(parameter.detach())[0]
        for model in context.models
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    finite = not weights or bool(torch.stack([one.isfinite().all() for one in weights]).all())
    if backend.sharded:  # other parts may be finite
        unlike = torch.tensor(int(not finite), device=context.device)
        finite = int(backend.sum(unlike).item()) == 0
    if not finite:
        raise NonFiniteError("HT613.weights-not-finite", step=step).of_all(context.world.rank)


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
    saved_step = saved.step if saved else 0
    raise NonFiniteError(
        "HT613.nonfinite-steps", context=context, ranks=ranks, step=step, saved_step=saved_step
    ).of_all(context.world.rank)


def gather(
    context: Context,
    others: Mapping[str, Any],
    position: Position,
    log: Mapping[str, Any],
) -> dict[str, Any]:
    """Collect the state of a session, part by part; called by all ranks.

    Args:
        context: context of the training.
        others: objects that the user added to the state, by name.
        position: position of the run.
        log: values of this rank for the next row of metrics.

    Returns:
        The state, with this rank's part of each tensor. Other ranks than 0 have only parameters and
        optimizer states that are right for all.
    """
    values = {
        name: plain_state.copied(one) for name, one in others.items() if plain_state.is_plain(one)
    }
    own = {**_of_this_rank(context), "log": dict(log), "values": values}
    if context.stream is not None:
        own["stream"] = context.stream.state_at(position.batches(context.batches.accumulate))
    ranks = context.backend.gather_object(own)
    small: dict[str, Any] = {}
    if context.world.rank == 0:
        small = _of_rank_0(context, others, position, ranks)
        ranks[0]["buffers"] = []
    models = [model.state_dict() for model in context.models]
    left_out = [] if context.frozen is None else frozen_weights.unchanged(context)
    for model, names in zip(models, left_out, strict=False):
        for name in names:
            del model[name]
    if small:
        small["position"]["left_out"] = left_out
    return {
        "model": models,
        "optimizer": [optimizer.state_dict() for optimizer in context.optimizers],
        **small,
    }


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
            "accumulate": context.batches.accumulate,
            "precision": context.precision.name,
            "trained": [
                [name for name, parameter in model.named_parameters() if parameter.requires_grad]
                for model in context.models
            ],
            "unused": [context.backend.has_unused(model) for model in context.models],
            "optimizers": [type(optimizer).__name__ for optimizer in context.optimizers],
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
