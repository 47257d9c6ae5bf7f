"""The protocol that every backend speaks; a process that is alone speaks it too."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.backends.baseline import Baseline
from hpctrain.backends.settings import Settings
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.rendezvous import Rendezvous

__all__ = ["Backend", "Work", "vector"]

T = TypeVar("T")


class Work:
    """Sums that are under way, read without waiting for the device.

    Args:
        sums: when they are done; Python's numbers are.
        work: what torch.distributed gave for them, if anything.
    """

    def __init__(self, sums: Tensor | Sequence[float], work: Any = None) -> None:
        self._work = work
        self._event: torch.cuda.Event | None = None
        self._host = sums
        if isinstance(sums, Tensor) and sums.is_cuda:
            if work is not None:
                work.wait()  # makes the stream wait, not the host
            self._host = torch.empty_like(sums, device="cpu", pin_memory=True)
            self._host.copy_(sums, non_blocking=True)
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
        return self._host.tolist() if isinstance(self._host, Tensor) else list(self._host)


def vector(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, some of them perhaps tensors of one element, as one float64 tensor."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.float64)
    # torch.as_tensor would copy a Python number over, and wait for all that the device has to do.
    return torch.stack(
        [
            n.to(device, torch.float64, non_blocking=True)
            if isinstance(n, Tensor)
            else torch.full((), n, dtype=torch.float64, device=device)
            for n in numbers
        ]
    )


class Backend(ABC):
    """How ranks talk. All methods but `between` are called by all ranks alike.

    Args:
        rendezvous: the ranks, their hosts and addresses.
        device: of this rank.
        settings: how it has to work.

    Attributes:
        name: as in `--backend`.
        transport: what carries the numbers, such as "gloo"; for people.
        rank, world_size: as the backend itself counts.
        device: of this rank.
        prints: whether its library prints on standard error by itself.
        mend: what to type where it counts other ranks than the launcher.
    """

    name: str
    transport: str
    captures_stderr: bool = False
    mismatch_hint: str = ""
    rank: int
    world_size: int
    device: torch.device

    @abstractmethod
    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: Settings
    ) -> None: ...

    @classmethod
    def check(cls, world: World, device: torch.device, settings: Settings) -> None:
        """Look for what cannot work, before the ranks meet.

        Raises:
            UsageError: something is missing here, or the settings contradict each other.
        """
        del world, device, settings

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it trains with the others; attributes and state_dict() stay its own."""

    @abstractmethod
    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Whether the next backward pass of a wrapped model averages its gradients."""

    def attach(self, loss: Tensor, first: bool) -> Tensor:
        """Let the backward pass of a loss average the gradients of every prepared model.

        However the loss was made: by `model(x)`, by another method, by the model as it was before
        `prepare`, and with parameters that were frozen or unfrozen since. Called by all ranks.

        Args:
            loss: of a micro-batch.
            first: whether that is the first one of its step.

        Returns:
            The loss to go backward from.
        """
        del first
        return loss

    def forget(self) -> None:  # noqa: B027, as only Horovod's hooks count
        """Micro-batches of the step under way do not count; its gradients are cleared."""

    def sync_gradients(self) -> None:  # noqa: B027, as ddp's backward pass has done it
        """After the last backward pass of a step: every gradient is now that of all ranks."""

    def update(self, optimizer: Optimizer, step: Callable[[Optimizer], None]) -> None:
        """Take an optimizer's step.

        Args:
            optimizer: one of those that were prepared.
            step: takes it on this rank, with the gradients as they are.
        """
        step(optimizer)

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""

    @abstractmethod
    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """Begin to sum each of some numbers over the ranks, in float64.

        Args:
            numbers: Python's, and on a GPU also tensors of one element on the device.
        """

    @abstractmethod
    def broadcast_object(self, thing: T) -> T:
        """Rank 0's object (picklable) on every rank."""

    @abstractmethod
    def gather_object(self, thing: T) -> list[T]:
        """The object (picklable) of every rank, at rank 0; at the others an empty list."""

    @abstractmethod
    def meet(self, words: str) -> list[str]:
        """Wait for all ranks, and give the words of each, in the order of ranks.

        Apart from all other exchanges: where another rank is at one of those, it comes to no harm.
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the tensors of rank 0, in place."""

    def send_recv(self, tensor: Tensor, source: int, target: int) -> None:
        """Send a tensor from one rank to another, in place; called by these two alone.

        Raises:
            UsageError: this backend has only collectives.
        """
        raise UsageError(f"{self.name} has no messages between two ranks", "", "--backend ddp")

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def baseline(self) -> Baseline:
        """The same without hpctrain, among the same ranks."""
        return Baseline()

    def explain(self, error: BaseException) -> HpctrainError | None:
        """Who is to blame for an error that came out of this backend; None where nobody knows."""
        del error
        return None

    @abstractmethod
    def close(self, failure: str | None = None) -> None:
        """Let go of everything.

        Args:
            failure: what went wrong on this rank; then the others may be gone.
        """
