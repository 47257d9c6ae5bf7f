"""Preparation of models and optimizers for a session."""

import hashlib
import io
import math
import os
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as activation_checkpoint

from hpctrain import checkpoint, optim
from hpctrain.arguments import Options
from hpctrain.backends.base import Backend
from hpctrain.backends.blocks import find_blocks
from hpctrain.backends.meta_models import allocate, on_meta
from hpctrain.backends.transparent import Transparent
from hpctrain.data.feed import Placement
from hpctrain.errors import UsageError
from hpctrain.optim import sync_batchnorm
from hpctrain.precision import Precision
from hpctrain.process.logging import logger
from hpctrain.training.consensus import on_all_ranks, on_rank_zero
from hpctrain.training.context import Context, parameters_of

__all__ = [
    "check_compiler",
    "check_schedule",
    "check_weights",
    "inner",
    "place_batches",
    "plan_schedule",
    "prepare_model",
    "prepare_optimizer",
    "refuse_other_data",
    "replaced",
    "share_state",
]


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
        raise UsageError(
            "HT609",
            f"--compile on a CPU, and there is no {' and no '.join(compilers)}",
            "a C++ compiler, which torch.compile calls",
            "apt-get install g++",
            "module load gcc",
            "leave --compile out",
        )


def check_weights(options: Options, rank: int) -> None:
    """Check `--init-from` before the rendezvous; rank 0 checks and reads it for all ranks.

    Raises:
        UsageError: the file cannot be opened, the package that reads it is missing, or there is
            `--init-skip` and no file.
    """
    if options.init_skip is not None and options.init_from is None:
        raise UsageError(
            "HT714",
            f"--init-skip {shlex.quote(options.init_skip)} without --init-from",
            "a file, of which it leaves out a part",
            "--init-from FILE",
        )
    if options.init_from is not None and rank == 0:
        checkpoint.check_weights(Path(options.init_from))


def prepare_model(model: nn.Module, context: Context) -> nn.Module:
    """Prepare a model for training with the other ranks, with the weights of rank 0.

    Args:
        model: model, changed in place.
        context: context of the training, with the models that were prepared before.

    Raises:
        UsageError: the model does not fit the file of `--init-from`.
    """
    backend, options, placement = context.backend, context.options, context.placement
    number = len(context.models)
    unfilled = on_meta(model) if placement.device.type != "meta" else []
    if unfilled:
        _refuse_without_values(model, unfilled, options)
    if not backend.sharded:
        if unfilled:
            allocate(model, "cpu")
        if options.init_from is not None:
            on_rank_zero(backend, lambda: _fill(model, number, options))
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
        _checkpoint_activations(model, options.fsdp_blocks)
    if options.compile:
        model.compile()  # type: ignore[no-untyped-call]
    wrapped = backend.wrap(model)
    if backend.sharded and options.init_from is not None:
        on_all_ranks(backend, lambda: _fill(model, number, options, backend))
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
        raise UsageError(
            "HT609",
            f"--activation-checkpointing, and no container of the {type(model).__name__} has "
            "several modules of one class",
            "blocks whose activations are computed again",
            "--fsdp-blocks CLASS, with the class of the blocks",
        )
    for block in blocks:
        block.forward = partial(activation_checkpoint, block.forward, use_reentrant=False)
    logger.info("the activations of %d blocks are computed again", len(blocks))


def _fill(model: nn.Module, number: int, options: Options, backend: Backend | None = None) -> None:
    """Load the file of `--init-from` into a model, or what this rank of a backend holds of it."""
    skip = [pattern.strip() for pattern in (options.init_skip or "").split(",") if pattern.strip()]
    path = Path(options.init_from or "")

    def read(weight: checkpoint.Weight, like: Tensor) -> Tensor:
        if backend is None or weight.shape != like.shape or not weight.shape:
            return weight.whole()
        extent, row = backend.extent(like), max(1, math.prod(weight.shape[1:]))
        rows = weight.rows(extent.start // row, extent.stop // row)
        return backend.from_part(rows.to(like.dtype).reshape(-1), like)

    checkpoint.fill_weights(path, model, number, skip, read)


def _refuse_without_values(model: nn.Module, unfilled: Sequence[str], options: Options) -> None:
    """Refuse a model on the meta device whose values nothing gives.

    Raises:
        UsageError: there is no `--init-from` for all of it, or it has a buffer that no file has.
    """
    absent = [name for name in unfilled if name not in model.state_dict()]
    made = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if options.init_from is None or options.init_skip:
        raise UsageError(
            "HT624",
            f"{unfilled[0]} and {len(unfilled) - 1} more tensors of the {type(model).__name__} are "
            "on the meta device, without values"
            + (", and --init-skip" if options.init_skip else ""),
            "the values of all of them",
            "--init-from FILE, without --init-skip (also with --resume, for the first start)",
            "the model on the CPU",
        )
    if made:
        raise UsageError(
            "HT624",
            f"{unfilled[0]} of the {type(model).__name__} is on the meta device, {made[0]} is not",
            "all parameters on the meta device, or none",
            "with torch.device('meta'): model = …",
        )
    if absent:
        raise UsageError(
            "HT624",
            f"the buffer {absent[0]} of the {type(model).__name__} is on the meta device, and is "
            "not in its state_dict()",
            "values for it",
            "with torch.device('cpu'): self.register_buffer(…, persistent=False)",
            "self.register_buffer(…), which the file then has to contain",
        )


def prepare_optimizer(optimizer: Optimizer, context: Context) -> None:
    """Apply the options for weight decay and learning rate to an optimizer.

    Args:
        optimizer: optimizer, changed in place.
        context: context of the training.

    Raises:
        UsageError: the optimizer has parameters of no prepared model, or has a scheduler
            that has already read values which an option changes.
    """
    options, batches = context.options, context.batches
    known = {parameter for model in context.models for parameter in model.parameters()}
    unprepared = [p for p in parameters_of(optimizer) if p not in known]
    if unprepared:
        raise UsageError(
            "HT606",
            f"{len(unprepared)} parameters of the {type(optimizer).__name__} are in no prepared "
            "model, so each rank would keep its own gradients of them",
            "parameters of prepared models",
            "session.prepare(model, optimizer), with such parameters in a module",
        )
    if optim.scheduled(optimizer) and (options.decay != "all" or options.lr_scaling != "none"):
        raise UsageError(
            "HT610",
            "a scheduler was made before session.prepare(), which changes the rates or groups "
            "that it has read (--decay, --lr-scaling)",
            "the scheduler after it",
            "model, optimizer = session.prepare(model, optimizer), then schedule = …(optimizer)",
        )
    if options.decay == "weights":
        freed = optim.split(optimizer, context.models)
        logger.info("no weight decay on %d norms and biases", freed)
    if options.lr_scaling != "none":
        factor = optim.scale(options.lr_scaling, batches.global_batch, options.lr_reference_batch)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        logger.info(
            "learning rate %.6g = given × %.6g (%s, global batch %d over %d)",
            optimizer.param_groups[0]["lr"],
            factor,
            options.lr_scaling,
            batches.global_batch,
            options.lr_reference_batch,
        )


def inner(model: nn.Module) -> nn.Module:
    """Return a prepared model as it was passed to `prepare`."""
    return model.module if isinstance(model, Transparent) else model


def replaced(optimizer: Optimizer, others: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the other optimizers that step on the same parameters, with a warning for each."""
    own = set(map(id, parameters_of(optimizer)))
    found = [other for other in others if not own.isdisjoint(map(id, parameters_of(other)))]
    for other in found:
        logger.warning(
            "a %s takes the place of the %s that was prepared for the same parameters",
            type(optimizer).__name__,
            type(other).__name__,
        )
    return found


def share_state(optimizer: Optimizer, backend: Backend) -> None:
    """Load the optimizer state of rank 0 on every rank; usually there is none yet.

    Args:
        optimizer: optimizer, changed in place.
        backend: backend of the session.
    """
    box = io.BytesIO()
    if backend.rank == 0 and optimizer.state:
        torch.save(optimizer.state_dict(), box)
    state = backend.broadcast_object(box.getvalue())
    if state:
        # Loading also moves the state to the device of the weights.
        optimizer.load_state_dict(torch.load(io.BytesIO(state), "cpu", weights_only=True))


def plan_schedule(
    options: Options, steps_per_epoch: int | None, epochs: int | None
) -> optim.Schedule | None:
    """Return the learning-rate schedule that the options ask for; None if the rate is constant.

    Args:
        options: options of the session; `--lr-*`, `--max-steps` are used.
        steps_per_epoch: number of steps in an epoch; None if the loader has no length.
        epochs: number of epochs of the run; None if only `--max-steps` ends it.

    Raises:
        UsageError: the schedule needs the length of an epoch, or of the run, and there is none.
    """
    if not options.sets_rates:
        return None
    by_epoch = options.lr_warmup_epochs or options.lr_schedule == "step"
    if steps_per_epoch is None and (
        by_epoch or (options.lr_schedule != "constant" and not options.max_steps)
    ):
        raise UsageError(
            "HT610",
            "--lr-warmup-epochs or --lr-schedule over a loader without a length",
            "one that says how many steps an epoch has",
            "--lr-warmup-steps N" if options.lr_warmup_epochs else "",
            "--max-steps N, for cosine and polynomial",
            "session.loader(dataset), or a loader with __len__",
        )
    ends = [options.max_steps] if options.max_steps else []
    if epochs is not None and steps_per_epoch is not None:
        ends.append(epochs * steps_per_epoch)
    length = steps_per_epoch or 0
    return optim.Schedule(
        options.lr_schedule,
        options.lr_warmup_steps or round(options.lr_warmup_epochs * length),
        min(ends) if ends else None,
        options.lr_step_epochs * length,
        options.lr_step_factor,
        options.lr_power,
        options.lr_min,
    )


def check_schedule(schedule: optim.Schedule, optimizers: Sequence[Optimizer]) -> None:
    """Check that the schedule of the options can set the learning rates of the optimizers.

    Raises:
        UsageError: an optimizer has a scheduler of the script or factors of timm for its rates, or
            all rates are below the least.
    """
    if any(map(optim.scheduled, optimizers)):
        raise UsageError(
            "HT610",
            "a scheduler of the script's own, and --lr-schedule or --lr-warmup-…",
            "one course of the learning rate",
            "leave the options out",
            "remove the scheduler from the script",
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any("lr_scale" in group for group in groups):
        raise UsageError(
            "HT610",
            "groups of parameters with lr_scale, which only timm's schedulers apply, and "
            "--lr-schedule or --lr-warmup-…",
            "the rate of each group in its lr",
            'for group in groups: group["lr"] = args.lr * group.pop("lr_scale")',
            "leave the options out, and step a scheduler of timm",
        )
    # Without a least rate, no tensor is read from its device.
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups if schedule.least]
    highest = max(rates, default=schedule.least)
    if schedule.least > highest:
        raise UsageError(
            "HT406",
            f"--lr-min {schedule.least:g}, and the highest rate of the optimizers is {highest:g}",
            "a least rate below it",
            f"--lr-min {highest / 10:g}",
        )


def refuse_other_data(context: Context) -> None:
    """Compare the data sets of all ranks with those of rank 0; called by all ranks.

    Each rank takes its part of an order that is computed from the length. If the copy on one host
    lacks some samples, its ranks would read other samples than their share, without an error. If
    ranks have different numbers of data sets, there is no comparison.

    Args:
        context: context of the training.

    Raises:
        UsageError: a rank has different data sets.
    """
    hosts = context.roster.host_names
    sets: Sequence[Any] = context.datasets
    seen = context.backend.gather_object([(len(one), _classes(one)) for one in sets])

    def compare() -> None:
        for rank, theirs in enumerate(seen):
            if len(theirs) != len(seen[0]):
                return
            for own, first in zip(theirs, seen[0], strict=True):
                if own != first:
                    other = " of other classes" if own[1] != first[1] else ""
                    raise UsageError(
                        "HT611",
                        f"a data set of {own[0]:,} samples{other} at rank {rank} on {hosts[rank]}, "
                        f"and of {first[0]:,} at rank 0 on {hosts[0]}",
                        "the same samples on all ranks",
                        "copy the same files to every host; to compare: find PATH -type f | wc -l",
                    )

    on_rank_zero(context.backend, compare)


def _classes(dataset: Any) -> str:
    """Hash the names of the classes, if any, which distinguish data sets of equal length."""
    classes = getattr(dataset, "classes", ())
    named = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return hashlib.sha256(repr(named).encode(errors="surrogateescape")).hexdigest()
