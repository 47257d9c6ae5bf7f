"""Preparation of optimizers for a session, and of the course of their learning rates."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from hpctrain import optim
from hpctrain.arguments import Options
from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.process.pytree import map_tensors
from hpctrain.training.context import Context, parameters_of
from hpctrain.training.schedulers import scheduled

__all__ = ["check_schedule", "plan_schedule", "prepare_optimizer"]


def prepare_optimizer(optimizer: Optimizer, context: Context) -> None:
    """Prepare an optimizer for training with the other ranks, with the state of rank 0.

    Args:
        optimizer: optimizer, changed in place.
        context: context of the training, with the optimizers that were prepared before. Those with
            the same parameters are replaced.

    Raises:
        UsageError: the optimizer has parameters of no prepared model, or has a scheduler
            that has already read values which an option changes.
    """
    context.backend.adopt(optimizer)
    _refuse_parameters(optimizer, context)
    _apply_options(optimizer, context)
    context.precision.adopt(optimizer)
    _share_state(optimizer, context.backend)
    _remove_replaced(optimizer, context.optimizers)
    context.optimizers.append(optimizer)


def _refuse_parameters(optimizer: Optimizer, context: Context) -> None:
    """Refuse parameters that are in no prepared model."""
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


def _apply_options(optimizer: Optimizer, context: Context) -> None:
    """Apply the options for weight decay and learning rate."""
    options, batches = context.options, context.batches
    if scheduled(optimizer) and (options.decay != "all" or options.lr_scaling != "none"):
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


def _remove_replaced(optimizer: Optimizer, others: list[Optimizer]) -> None:
    """Remove the other optimizers that step on the same parameters, with a warning for each."""
    own = set(map(id, parameters_of(optimizer)))
    for other in [one for one in others if not own.isdisjoint(map(id, parameters_of(one)))]:
        others.remove(other)
        logger.warning(
            "a %s takes the place of the %s that was prepared for the same parameters",
            type(optimizer).__name__,
            type(other).__name__,
        )


def _share_state(optimizer: Optimizer, backend: Backend) -> None:
    """Load the optimizer state of rank 0 on every rank; usually there is none yet."""
    own = optimizer.state_dict() if backend.rank == 0 and optimizer.state else None
    state = backend.broadcast_object(map_tensors(Tensor.cpu, own))
    if state is not None:
        optimizer.load_state_dict(state)  # which moves it to the device of the weights


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
    if any(map(scheduled, optimizers)):
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
