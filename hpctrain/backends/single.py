"""The backend for one process: no communication and no overhead."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpctrain.backends.base import Backend, Work, vector
from hpctrain.backends.settings import BackendSettings
from hpctrain.process.device import sums_on_host
from hpctrain.rendezvous import Rendezvous

__all__ = ["Single"]

T = TypeVar("T")


class Single(Backend):
    """A world of one rank."""

    name = "single"
    transport = "none"

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        self.rank, self.world_size, self.device = 0, 1, device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Do nothing: the gradients are ready."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is its own sum."""
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is its own maximum."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor with one more dimension."""
        return tensor[None]

    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """Return the numbers, which are their own sums; on the host without a tensor."""
        return Work(numbers if sums_on_host(self.device) else vector(numbers, self.device))

    def broadcast_object(self, thing: T, source: int = 0) -> T:
        """Return the object itself."""
        return thing

    def gather_object(self, thing: T) -> list[T]:
        """Return a list of the object."""
        return [thing]

    def all_gather_text(self, text: str) -> list[str]:
        """Return a list of the text."""
        return [text]

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Do nothing."""

    def barrier(self) -> None:
        """Do nothing."""

    def close(self, failure: str | None = None) -> None:
        """Do nothing."""
