"""Exponential moving average of the weights, which is often more accurate than the weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.optim.foreach import at_least_fp32, grouped

__all__ = ["EMA"]


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter


class EMA:
    """Average ← decay · average + (1 − decay) · weight, for each floating-point parameter.

    The averages start at the current weights. They are stored in fp32, or in fp64 for fp64 weights:
    in half precision, rounding would remove a change of 1 − decay.

    Buffers are not averaged, so an averaged model has the current ones. Running statistics of batch
    norm are already averages over many steps, and an average of counters has no meaning.

    Args:
        models: models whose parameters are averaged; a shared parameter counts once.
        decay: decay per optimizer step, at least 0 and below 1.
        source: function from a parameter to the tensor to average, such as the fp32 weights from
            which a half-precision parameter is rounded; called in each update.

    Raises:
        UsageError: the decay is below 0, or not below 1.

    Source: Polyak and Juditsky 1992, doi 10.1137/0330046; in this form, Szegedy et al. 2016, arXiv
    1512.00567, section 8.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        decay: float,
        source: Callable[[nn.Parameter], Tensor] = _itself,
    ) -> None:
        if not 0 <= decay < 1:
            raise UsageError(
                "HT406",
                f"an average of the weights with decay {decay}",
                "from 0 to below 1",
                "--ema 0.999",
            )
        self.decay = decay
        self._source = source
        self._models = list(models)
        self._replaced: dict[Tensor, Tensor] = {}  # the values that the averages have replaced
        # By parameter, in the order of the models; a shared parameter has one entry.
        self._averages: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for model in self._models:
                for parameter in model.parameters():
                    if parameter.is_floating_point() and parameter not in self._averages:
                        weight = source(parameter)
                        dtype = at_least_fp32(weight.dtype)
                        self._averages[parameter] = weight.detach().to(dtype, copy=True)

    def update(self) -> None:
        """Update the averages after an optimizer step, without waiting for a device.

        Raises:
            UsageError: `swapped()` is open, so the weights are the averages.
        """
        if self._replaced:
            raise UsageError(
                "HT409",
                "EMA.update() inside of swapped()",
                "an update after an optimizer's step",
                "end the swapped() context first",
            )
        weights = {average: self._source(p) for p, average in self._averages.items()}
        with torch.no_grad():
            for averages in grouped(weights):
                dtype = averages[0].dtype
                latest = [weights[average].to(dtype) for average in averages]
                torch._foreach_lerp_(averages, latest, 1 - self.decay)

    def restart(self) -> None:
        """Restart the averages at the current weights."""
        with torch.no_grad():
            for parameter, average in self._averages.items():
                average.copy_(self._source(parameter))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the averages into the models; restore weights and buffers at the end.

        Values are restored bit by bit, also after an exception. Buffers are restored so that a
        forward pass in training mode does not affect the training.

        Raises:
            UsageError: `swapped()` is already open.
        """
        if self._replaced:
            raise UsageError(
                "HT409",
                "EMA.swapped() inside of swapped()",
                "no nested contexts",
                "end the outer context first",
            )
        for tensor in (*self._averages, *(b for model in self._models for b in model.buffers())):
            self._replaced[tensor] = tensor.detach().clone()
        try:
            _put(self._averages)
            yield
        finally:
            _put(self._replaced)
            self._replaced = {}

    @contextmanager
    def original(self) -> Iterator[None]:
        """Put the weights into the models, for a checkpoint inside of `swapped()`."""
        replaced = self._replaced
        if not replaced:
            yield
            return
        averages = {tensor: tensor.detach().clone() for tensor in replaced}
        self._replaced = {}
        _put(replaced)
        try:
            yield
        finally:
            _put(averages)
            self._replaced = replaced

    def state_dict(self) -> dict[str, Any]:
        """Return the averages of each model, by parameter name, without copying them.

        The decay is an option of a run, not a part of its state.
        """
        return {
            "averages": [
                {
                    name: self._averages[p]
                    for name, p in model.named_parameters()
                    if p in self._averages
                }
                for model in self._models
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load averages.

        Args:
            state: result of `state_dict()`.

        Raises:
            CheckpointError: the state belongs to other models; then nothing is changed.
        """
        own, loaded = self.state_dict()["averages"], state["averages"]
        found, expected = _shapes(loaded), _shapes(own)
        other = [key for key in expected | found if found.get(key) != expected.get(key)]
        if other:
            name, number = other[0]
            shapes = f"{found.get(other[0], 'missing')}, not {expected.get(other[0], 'there')}"
            raise CheckpointError(
                "HT405",
                f"averages of other weights: {name} of model {number} is {shapes}",
                "averages of the same models, in the same order",
                "resume with the script and options that wrote the checkpoint",
                "leave --ema out",
            )
        with torch.no_grad():
            for averages, saved in zip(own, loaded, strict=True):
                for name, average in averages.items():
                    average.copy_(saved[name])


def _put(values: Mapping[Any, Tensor]) -> None:
    """Copy each value into its tensor."""
    with torch.no_grad():
        # One by one, as torch has no such operation for lists of divided tensors.
        for tensor, value in values.items():
            tensor.copy_(value)


def _shapes(models: Sequence[Mapping[str, Tensor]]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the shape of each average, by its name and the number of its model."""
    return {
        (name, number): tuple(average.shape)
        for number, averages in enumerate(models)
        for name, average in averages.items()
    }
