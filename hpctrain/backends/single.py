"""One process: nothing to exchange, and nothing to pay for it."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpctrain.backends.base import Backend, Later, vector
from hpctrain.backends.settings import Settings
from hpctrain.rendezvous import Meeting

__all__ = ["Single"]

T = TypeVar("T")


class Single(Backend):
    """A world of one rank."""

    name = "single"
    transport = "none"

    def __init__(self, meeting: Meeting, device: torch.device, settings: Settings) -> None:
        del meeting, settings
        self.rank, self.world_size, self.device = 0, 1, device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Nothing: gradients are ready as they are."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor is its own sum."""
        return tensor

    def sum_later(self, numbers: Sequence[Any]) -> Later:
        """The numbers are their own sums; on a CPU no tensor is needed to say so."""
        return Later(numbers if self.device.type == "cpu" else vector(numbers, self.device))

    def share(self, thing: T) -> T:
        """The object itself."""
        return thing

    def gather(self, thing: T) -> list[T]:
        """The object itself."""
        return [thing]

    def meet(self, words: str) -> list[str]:
        """The words themselves."""
        return [words]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Nothing."""

    def between(self, tensor: Tensor, source: int, target: int) -> None:
        """Nothing: the only rank has it."""

    def barrier(self) -> None:
        """Nothing."""

    def close(self, failure: str | None = None) -> None:
        """Nothing."""
