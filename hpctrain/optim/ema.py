"""An exponential moving average of the weights, which often does better than the weights."""

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
    """average ← decay · average + (1 − decay) · weight, for each floating-point parameter.

    It begins with the weights as they are. Averages are kept in fp32, those of fp64 weights in
    fp64: in half, a change of 1 − decay would be rounded away.

    Buffers are not averaged. Running statistics of batch norm are averages over many steps already,
    and of counters an average makes no sense; so an averaged model has the current ones.

    Args:
        models: whose parameters are averaged; one that several modules share counts once.
        decay: from 0 to below 1, for each optimizer step.
        source: for a parameter, the tensor to average, such as the fp32 weights from which a half
            parameter is rounded; asked in each update.

    Raises:
        UsageError: a decay that is not from 0 to below 1.

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
                f"an average of the weights with decay {decay}", "from 0 to below 1", "--ema 0.999"
            )
        self.decay = decay
        self._source = source
        self._models = list(models)
        self._kept: dict[Tensor, Tensor] = {}  # what the averages took the place of
        # By parameter, in the order of the models; a shared one has one entry.
        self._averages: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for model in self._models:
                for parameter in model.parameters():
                    if parameter.is_floating_point() and parameter not in self._averages:
                        weight = source(parameter)
                        dtype = at_least_fp32(weight.dtype)
                        self._averages[parameter] = weight.detach().to(dtype, copy=True)

    def update(self) -> None:
        """Take up the weights, after an optimizer's step. Waits for no device.

        Raises:
            UsageError: inside of `swapped()`, where the weights are the averages.
        """
        if self._kept:
            raise UsageError(
                "EMA.update() inside of swapped()",
                "an update after an optimizer's step",
                "leave swapped() first",
            )
        weights = {average: self._source(p) for p, average in self._averages.items()}
        with torch.no_grad():
            for averages in grouped(weights):
                dtype = averages[0].dtype
                latest = [weights[average].to(dtype) for average in averages]
                torch._foreach_lerp_(averages, latest, 1 - self.decay)

    def restart(self) -> None:
        """Begin anew with the weights as they are."""
        with torch.no_grad():
            for parameter, average in self._averages.items():
                average.copy_(self._source(parameter))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averages are in the models; afterwards weights and buffers are as they were.

        They are so bit by bit, and after an exception too. Buffers are put back so that a forward
        pass in training mode leaves no trace in the training.

        Raises:
            UsageError: it is open already.
        """
        if self._kept:
            raise UsageError(
                "EMA.swapped() inside of swapped()", "one at a time", "leave the outer one first"
            )
        for tensor in (*self._averages, *(b for model in self._models for b in model.buffers())):
            self._kept[tensor] = tensor.detach().clone()
        try:
            _put(self._averages)
            yield
        finally:
            _put(self._kept)
            self._kept = {}

    @contextmanager
    def original(self) -> Iterator[None]:
        """The weights are in the models, also inside of `swapped()`: for a checkpoint there."""
        kept = self._kept
        if not kept:
            yield
            return
        inside = {tensor: tensor.detach().clone() for tensor in kept}
        self._kept = {}
        _put(kept)
        try:
            yield
        finally:
            _put(inside)
            self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        """The averages: for each model, by the names of its parameters. Not copies.

        The decay is an option of a run, and no part of its state.
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
        """Take up averages.

        Args:
            state: from `state_dict()`.

        Raises:
            CheckpointError: it is of other models; then nothing has changed.
        """
        mine, theirs = self.state_dict()["averages"], state["averages"]
        found, expected = ([_shapes(model) for model in each] for each in (theirs, mine))
        if found != expected:
            raise CheckpointError(
                f"averages of other weights: {_difference(found, expected)}",
                "averages of the same models, in the same order",
                "resume with the script and options that wrote the checkpoint, or leave out --ema",
            )
        with torch.no_grad():
            for averages, saved in zip(mine, theirs, strict=True):
                for name, average in averages.items():
                    average.copy_(saved[name])


def _put(values: Mapping[Any, Tensor]) -> None:
    """Copy each value into the tensor that it is kept for."""
    with torch.no_grad():
        for tensors in grouped(values):
            torch._foreach_copy_(tensors, [values[tensor] for tensor in tensors])


def _shapes(averages: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(average.shape) for name, average in averages.items()}


def _difference(
    found: list[dict[str, tuple[int, ...]]], expected: list[dict[str, tuple[int, ...]]]
) -> str:
    """The first difference, in words."""
    if len(found) != len(expected):
        return f"{len(found)} models, not {len(expected)}"
    for theirs, mine in zip(found, expected, strict=True):
        for name in {**mine, **theirs}:
            if theirs.get(name) != mine.get(name):
                return f"{name} is {theirs.get(name, 'missing')}, not {mine.get(name, 'there')}"
    return "none"
