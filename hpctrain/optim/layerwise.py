"""Base of LARS and LAMB: a learning rate for each layer, and steps that never wait for a GPU.

A layer is a parameter tensor, as in both papers. For cases that the papers leave open, these
conventions hold, from the MLPerf reference for LARS and from apex for LAMB:

- A group with `weight_decay=0` has the trust ratio 1: norms and biases take steps of plain momentum
  or Adam, because their own norms are a poor measure for the length of a step.
- A layer whose weights, or whose gradients (LARS) or update (LAMB), are all zeros has the ratio 1,
  so that it can change.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.optim.foreach import at_least_fp32, grouped

__all__ = ["ForeachGroup", "Layerwise", "norms", "not_negative", "trust_ratios"]


def not_negative(optimizer: str, **settings: float | Tensor) -> None:
    """Check that an optimizer's settings are not negative.

    Raises:
        UsageError: a setting is below 0, or NaN.
    """
    for name, value in settings.items():
        if not value >= 0:
            raise UsageError(
                "HT406",
                f"{optimizer}(…, {name}={value})",
                "a number that is not negative",
                f"{name}=X, 0 or more",
            )


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, of shape (len(tensors),), on their device."""
    return torch.stack(torch._foreach_norm(tensors, 2, at_least_fp32(tensors[0].dtype)))


def trust_ratios(
    weights: list[Tensor], updates: list[Tensor], formula: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Return the factor of each layer's update, of shape (), on the device.

    Args:
        weights: weights of the layers.
        updates: gradients or updates of the same layers.
        formula: function from the norms of both, each of shape (layers,), to the ratios; if a norm
            is zero, the ratio is 1 instead.
    """
    weight_norms, update_norms = norms(weights), norms(updates)
    # Filled on the device, because an `if` would wait for it.
    zero = (weight_norms == 0) | (update_norms == 0)
    return formula(weight_norms, update_norms).masked_fill(zero, 1.0).unbind()


class ForeachGroup:
    """Parameters of a group that have gradients, with the same device and dtype.

    Args:
        group: group of the optimizer.
        parameters: parameters; at least one.
    """

    def __init__(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        self.group = group
        self.parameters = parameters
        self.dtype = at_least_fp32(parameters[0].dtype)

    def gradients(self) -> list[Tensor]:
        """Return the gradients in at least fp32; often not copies, so they must not be changed."""
        return [p.grad.to(self.dtype) for p in self.parameters if p.grad is not None]

    def weights(self) -> list[Tensor]:
        """Return the weights in at least fp32: the parameters, or copies of half-precision ones."""
        if self.parameters[0].dtype == self.dtype:
            return self.parameters
        return [p.to(self.dtype) for p in self.parameters]

    def descend(self, weights: list[Tensor], updates: list[Tensor]) -> None:
        """Set the parameters to weights minus learning rate times updates.

        Args:
            weights: result of `weights()`.
            updates: updates of the same shapes and dtype; they are not changed.
        """
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            # As `alpha`, the host would have to read it.
            device = self.parameters[0].device
            lr = lr.reshape(()).to(device, self.dtype, non_blocking=True)
            torch._foreach_sub_(weights, torch._foreach_mul(updates, lr))
        else:
            torch._foreach_add_(weights, updates, alpha=-lr)
        if self.parameters[0].dtype != self.dtype:
            torch._foreach_copy_(self.parameters, weights)


class Layerwise(Optimizer):
    """Optimizer with a trust ratio for each layer; subclasses define `update`.

    Tensors of one device and dtype are processed together. Half-precision parameters have their
    computation and state in fp32.

    Attributes:
        needs_whole_weights: True, as a trust ratio needs the norms of whole weights.
    """

    needs_whole_weights = True

    def update(self, parts: list[ForeachGroup]) -> None:
        """Update all parameters that have gradients."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do an optimizer step; parameters without a gradient are not changed.

        Args:
            closure: function that clears the gradients, computes the loss and the gradients, and
                returns the loss.

        Returns:
            Result of the closure, or None.

        Raises:
            UsageError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.update(
                [
                    ForeachGroup(group, parameters)
                    for group in self.param_groups
                    for parameters in grouped(self._with_gradients(group))
                ]
            )
        return loss

    def _with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            gradient = parameter.grad
            if gradient.layout != torch.strided or gradient.is_complex():
                kind = "complex" if gradient.is_complex() else "sparse"
                raise UsageError(
                    "HT407",
                    f"{type(self).__name__} got a {kind} gradient of shape {tuple(gradient.shape)}",
                    "dense, real gradients",
                    "Embedding(…, sparse=False)",
                    "another optimizer for these parameters",
                )
        return parameters

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state exactly: the state of half-precision parameters stays in fp32.

        Args:
            state_dict: result of `state_dict()` of an optimizer with groups of the same sizes.

        Raises:
            ValueError: the groups have other sizes (raised by torch).
        """
        super().load_state_dict(state_dict)
        # torch has rounded the state to the dtype of the parameters.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, parameters, strict=True):
            dtype = at_least_fp32(parameter.dtype)
            if dtype == parameter.dtype:
                continue
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, dtype)

    def buffers(self, part: ForeachGroup, name: str) -> list[Tensor]:
        """Return the state of each parameter under a name: zeros at first."""
        for parameter in part.parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, dtype=part.dtype)
        return [self.state[parameter][name] for parameter in part.parameters]
