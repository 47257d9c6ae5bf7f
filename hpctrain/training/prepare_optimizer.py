"""Preparation of optimizers for a session."""

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.process.pytree import map_tensors
from hpctrain.training.context import Context, parameters_of

__all__ = ["prepare_optimizer"]


def prepare_optimizer(optimizer: Optimizer, context: Context) -> None:
    """Prepare an optimizer for training with the other ranks, with the state of rank 0.

    Args:
        optimizer: optimizer, changed in place.
        context: context of the training, with the optimizers that were prepared before. Those with
            the same parameters are replaced.

    Raises:
        UsageError: the optimizer has parameters of no prepared model.
    """
    context.backend.adopt(optimizer)
    _refuse_parameters(optimizer, context)
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
            "HT606.parameters-not-prepared", count=len(unprepared), kind=type(optimizer).__name__
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
