"""The protocol that every backend speaks; a process that is alone speaks it too."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Backend", "Later"]

T = TypeVar("T")


class Later:
    """A sum that is under way, read without waiting for the device.

    Args:
        tensor: the sum, when it is done.
        work: what torch.distributed gave for it, if anything.
    """

    def __init__(self, tensor: Tensor, work: Any = None) -> None:
        self._work = work
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            if work is not None:
                work.wait()  # makes the stream wait, not the host
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """Whether `values` returns at once."""
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._work is None or self._work.is_completed()

    def values(self) -> list[float]:
        """The numbers; waits for them where it must."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._host.tolist()


class Backend(ABC):
    """How ranks talk. All methods but `rank` and `world_size` are called by all ranks alike.

    Attributes:
        name: as in `--backend`.
        transport: what carries the numbers, such as "gloo"; for people.
        rank, world_size: as the backend itself counts.
        device: of this rank.
    """

    name: str
    transport: str
    rank: int
    world_size: int
    device: torch.device

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it trains with the others; attributes and state_dict() stay its own."""

    @abstractmethod
    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Whether the next backward pass of a wrapped model averages its gradients."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""

    @abstractmethod
    def sum_later(self, tensor: Tensor) -> Later:
        """Begin to sum a tensor over the ranks, in place."""

    @abstractmethod
    def share(self, thing: T) -> T:
        """Rank 0's object (picklable) on every rank."""

    @abstractmethod
    def align(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, such as the statistics of batch norm."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Let go of everything. With `failed` the other ranks may be gone."""
