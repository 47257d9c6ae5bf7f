"""One process: nothing to exchange, and nothing to pay for it."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpctrain.backends.base import Backend, Work, vector
from hpctrain.backends.settings import Settings
from hpctrain.rendezvous import Rendezvous

__all__ = ["Single"]

T = TypeVar("T")


class Single(Backend):
    """A world of one rank."""

    name = "single"
    transport = "none"

    def __init__(self, rendezvous: Rendezvous, device: torch.device, settings: Settings) -> None:
        del rendezvous, settings
        self.rank, self.world_size, self.device = 0, 1, device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Nothing: gradients are ready as they are."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor is its own sum."""
        return tensor

    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """The numbers are their own sums; on a CPU no tensor is needed to say so."""
        return Work(numbers if self.device.type == "cpu" else vector(numbers, self.device))

    def broadcast_object(self, thing: T) -> T:
        """The object itself."""
        return thing

    def gather_object(self, thing: T) -> list[T]:
        """The object itself."""
        return [thing]

    def meet(self, words: str) -> list[str]:
        """The words themselves."""
        return [words]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Nothing."""

    def send_recv(self, tensor: Tensor, source: int, target: int) -> None:
        """Nothing: the only rank has it."""

    def barrier(self) -> None:
        """Nothing."""

    def close(self, failure: str | None = None) -> None:
        """Nothing."""
