"""Preparation of models for a session, and checks of what they need."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as activation_checkpoint

from hpctrain.arguments import Options
from hpctrain.backends.blocks import find_blocks
from hpctrain.backends.meta_models import Unfilled, allocate, on_meta
from hpctrain.backends.transparent import Transparent
from hpctrain.cluster.texts import ranks_text
from hpctrain.data.feed import Placement
from hpctrain.errors import UsageError
from hpctrain.precision import Precision
from hpctrain.process.logging import logger
from hpctrain.training import sync_batchnorm
from hpctrain.training.consensus import ask, on_rank_zero, refuse_unlike_answers
from hpctrain.training.context import Context

__all__ = [
    "check_compiler",
    "inner",
    "place_batches",
    "prepare_model",
    "refuse_unlike",
]


def refuse_unlike(things: Sequence[object], context: Context) -> None:
    """Check that all ranks are about to prepare the same models and optimizers; called by all.

    Gradients and states are exchanged by the place of a parameter in its model. Layers in another
    order on one rank, with equal shapes, would mix those of different layers.

    Args:
        things: arguments of `prepare`.
        context: context of the training, with the models that were prepared before.

    Raises:
        UsageError: a rank calls something else, or has another name, shape or type at some place.
    """
    backend = context.backend
    if backend.world_size == 1:
        return
    lines = _description(things, context.models)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = ask(backend, "session.prepare()", digest)
    refuse_unlike_answers(answers)
    others = [rank for rank, one in enumerate(answers) if one.note != answers[0].note]
    if others:
        every = backend.gather_object(lines)
        on_rank_zero(backend, partial(_raise_difference, others, every))


def _description(things: Sequence[object], prepared: Sequence[nn.Module]) -> list[str]:
    """Describe each parameter and buffer of models, and each parameter of optimizers."""
    models = [thing for thing in things if isinstance(thing, nn.Module)]
    lines, names = [], {}
    for number, model in enumerate([*prepared, *models]):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            names[id(tensor)] = f"{name} of model {number}"
    for model in models:
        lines.append(type(inner(model)).__name__)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            shape = "lazy" if is_lazy(tensor) else tuple(tensor.shape)
            frozen = (
                ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
            )
            lines.append(f"{name} {shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}")
    for optimizer in (thing for thing in things if isinstance(thing, Optimizer)):
        lines.append(type(optimizer).__name__)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(getattr(parameter, "divided", parameter)), "a parameter")
                lines.append(f"{name} in group {number}")
    return lines


def _raise_difference(others: Sequence[int], every: Sequence[Sequence[str]]) -> None:
    pairs = enumerate(zip_longest(every[others[0]], every[0], fillvalue="nothing"), 1)
    number, (local, first) = next(one for one in pairs if one[1][0] != one[1][1])
    place = {"ranks": ranks_text(others), "rank": others[0], "number": number}
    raise UsageError("HT625.models-differ", **place, local=local, first=first)


def place_batches(options: Options, precision: Precision) -> Placement:
    """Return the placement of batches, with channels last if this makes convolutions faster.

    That is so in half precision on GPUs; with fp32 it would be slower. Source: "Channels Last
    Memory Format in PyTorch", torch's tutorials.
    """
    channels_last = options.channels_last
    if channels_last is None:
        channels_last = precision.device.type == "cuda" and precision.reduced
    return Placement(precision.device, precision.dtype, channels_last)


def check_compiler(options: Options, device: torch.device) -> None:
    """Check for the compiler that torch.compile needs, long before its first use.

    Raises:
        UsageError: there is no compiler.
    """
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if options.compile and device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise UsageError("HT609.compiler-missing", compilers=" and no ".join(compilers))


def prepare_model(model: nn.Module, context: Context) -> nn.Module:
    """Prepare a model for training with the other ranks, with the weights of rank 0.

    Args:
        model: model, changed in place.
        context: context of the training, with the models that were prepared before.

    Raises:
        UsageError: a part of the model is on the meta device, where `load_weights` cannot fill it.
    """
    backend, options, placement = context.backend, context.options, context.placement
    unfilled = on_meta(model) if placement.device.type != "meta" else []
    if unfilled:
        _refuse_parts(model, unfilled)
    if not backend.sharded:
        if unfilled:
            allocate(model, "cpu")
        model.to(placement.device)
        if placement.channels_last:
            for parameter in model.parameters():
                if parameter.dim() == 4:  # weights of 2-D convolutions; torch refuses others
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    # torch's own layers sum only over torch.distributed on GPUs.
    theirs = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if options.sync_batchnorm or theirs:
        sync_batchnorm.convert(model, backend)
    context.precision.convert(model)
    if options.activation_checkpointing:
        _checkpoint_activations(model, options.settings("fsdp")["blocks"])
    if options.compile:
        model.compile()  # type: ignore[no-untyped-call]
    wrapped = backend.wrap(model)
    if unfilled:
        context.unfilled.append(Unfilled(inner(wrapped), unfilled))
    return wrapped


def _checkpoint_activations(model: nn.Module, names: str | None) -> None:
    """Let the blocks of a model keep their inputs only; the numbers stay the same.

    The activations of a block are computed again in the backward pass. Source: torch's
    documentation of `torch.utils.checkpoint`; Chen et al., "Training Deep Nets with Sublinear
    Memory Cost", 2016 (arXiv 1604.06174).

    Args:
        model: model, changed in place.
        names: names of the blocks' classes, as for `find_blocks`.

    Raises:
        UsageError: the model has no blocks.
    """
    blocks = find_blocks(model, names)
    if not blocks:
        raise UsageError("HT609.no-blocks", kind=type(model).__name__)
    for block in blocks:
        block.forward = partial(activation_checkpoint, block.forward, use_reentrant=False)
    logger.info("the activations of %d blocks are computed again", len(blocks))


def _refuse_parts(model: nn.Module, unfilled: Sequence[str]) -> None:
    """Refuse a model on the meta device that cannot get all of its values from a file.

    Args:
        model: model to check.
        unfilled: names of its tensors on the meta device.

    Raises:
        UsageError: only some parameters are there, or a buffer that no file has.
    """
    absent = [name for name in unfilled if name not in model.state_dict()]
    made = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if made:
        raise UsageError(
            "HT624.partly-meta", unfilled=unfilled, kind=type(model).__name__, made=made
        )
    if absent:
        raise UsageError("HT624.buffer-not-saved", absent=absent, kind=type(model).__name__)


def inner(model: nn.Module) -> nn.Module:
    """Return a prepared model as it was passed to `prepare`."""
    return model.module if isinstance(model, Transparent) else model
