"""The interface of all backends, including the one for a single process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.backends.extent import Extent
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.texts import ranks_text
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, RankMissingError
from hpctrain.process.device import sums_on_host
from hpctrain.process.heartbeat import Heartbeat
from hpctrain.rendezvous import Rendezvous

__all__ = ["Backend", "Work", "missing_error", "vector"]

T = TypeVar("T")


class Work:
    """Sums in progress, which can be read without waiting for the device.

    Args:
        sums: tensor that holds the sums when they are done, or finished Python numbers.
        work: handle of the backend's library for the sums in progress, or None.
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
        """Check whether `values` returns at once."""
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._work is None or self._work.is_completed()

    def values(self) -> list[float]:
        """Return the sums; wait for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._host.tolist() if isinstance(self._host, Tensor) else list(self._host)


def vector(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return numbers as one float64 tensor; some of them may be tensors of one element."""
    if sums_on_host(device):
        return torch.tensor(numbers, dtype=torch.float64)
    # torch.as_tensor would copy a Python number, and wait for all pending work of the device.
    return torch.stack(
        [
            n.to(device, torch.float64, non_blocking=True)
            if isinstance(n, Tensor)
            else torch.full((), n, dtype=torch.float64, device=device)
            for n in numbers
        ]
    )


def missing_error(
    rendezvous: Rendezvous, missing: Sequence[int], timeout: float
) -> RankMissingError:
    """Return the error that names the ranks that were lost after the rendezvous."""
    ranks = ranks_text(missing, rendezvous.roster.host_names)
    return RankMissingError("HT305.lost-after-rendezvous", ranks=ranks, limit_s=timeout)


class Backend(ABC):
    """The communication of the ranks. All ranks call all methods alike.

    Args:
        rendezvous: all ranks, with their hosts and addresses.
        device: device used by this rank.
        settings: settings of the backend.

    Attributes:
        name: name of the backend, as in `--backend`.
        transport: library that carries the data, such as "gloo"; for messages to the user.
        rank: rank of this process, as the backend counts.
        world_size: number of ranks, as the backend counts.
        device: device used by this rank.
        captures_stderr: whether to capture standard error, as the backend's library writes to it.
        sharded: whether each rank holds only a part of the weights and optimizer states.
        reduction: what a step does with the gradients of the ranks: "mean", "sum", "adasum", which
            combines updates, or "powersgd", which averages approximately.
        buffers_gradients: whether gradients can be views of message buffers, which the next
            backward pass overwrites.
        mismatch: key of the error when the backend's ranks differ from the launcher's.
    """

    name: str
    transport: str
    captures_stderr: bool = False
    sharded: bool = False
    reduction: str = "mean"
    buffers_gradients: bool = False
    mismatch: str = "HT303.rank-differs"
    rank: int
    world_size: int
    device: torch.device

    @abstractmethod
    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None: ...

    @property
    def device_of_sums(self) -> torch.device:
        """Device of sums in float64."""
        return torch.device("cpu") if sums_on_host(self.device) else self.device

    @classmethod
    def check(cls, world: World, device: torch.device, settings: BackendSettings) -> None:
        """Check whether the backend can work, before the rendezvous.

        Raises:
            UsageError: something is missing on this host, or the settings contradict each other.
        """
        del world, device, settings

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model prepared for all ranks; it keeps its attributes and state_dict()."""

    def adopt(self, optimizer: Optimizer) -> None:  # noqa: B027, as others keep the parameters
        """Prepare an optimizer, which may have been created before its models were wrapped."""

    @abstractmethod
    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Set whether the next backward pass of a wrapped model averages its gradients."""

    def attach(self, loss: Tensor) -> Tensor:
        """Let the backward pass of a loss average the gradients of every prepared model.

        This works however the loss was computed: by `model(x)`, by another method, by the model as
        it was before `prepare`, and with parameters that were frozen or unfrozen since. Called by
        all ranks.

        Args:
            loss: loss of a micro-batch, or one of several.

        Returns:
            The loss on which to call `backward`.
        """
        return loss

    def report_to(self, heartbeat: Heartbeat) -> None:  # noqa: B027, as only fsdp waits by itself
        """Report waits for other ranks outside of the exchanges that a caller reports."""

    @property
    def call_order(self) -> int:
        """A number below 2**20 that differs if ranks have called models in another order."""
        return 0

    def has_unused(self, model: nn.Module) -> bool:
        """Return whether losses were found that do not use all trained parameters of a model."""
        return False

    def expect_unused(self, model: nn.Module) -> None:  # noqa: B027, as others need not know
        """Expect losses that do not use all trained parameters of a model; called by all ranks."""

    def forget(self) -> None:  # noqa: B027, as only Horovod holds some back
        """Discard the micro-batches of the current step; its gradients are cleared."""

    def sync_gradients(self) -> None:  # noqa: B027, as ddp's backward pass has done it
        """Wait until every gradient is averaged, after a backward pass that averages."""

    def take_unaveraged(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters whose gradients the last micro-batch of a step does not average.

        These are parameters of models that only earlier micro-batches have used. They count as
        averaged from now on.

        Args:
            parameters: parameters of an optimizer.
        """
        return []

    def update(self, optimizer: Optimizer, step: Callable[[Optimizer], None]) -> None:
        """Take an optimizer step.

        Args:
            optimizer: a prepared optimizer.
            step: function that takes the step on this rank, with the current gradients.
        """
        step(optimizer)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all of a weight, gradient or state; called by all ranks."""
        return tensor

    def held(self, tensor: Tensor) -> tuple[Tensor, Extent]:
        """Return what this rank holds of a weight, gradient or state, and which part it is.

        Called by all ranks, for the same tensors in the same order.
        """
        return tensor, self.extent(tensor)

    def extent(self, tensor: Tensor) -> Extent:
        """Return which part of a weight or state this rank holds."""
        return Extent.whole(tensor.shape, range(self.world_size))

    def from_part(self, values: Tensor, like: Tensor) -> Tensor:
        """Return a weight or state of which this rank holds a part.

        Args:
            values: elements of this rank's part, of shape (n,).
            like: tensor of the same shape, which is divided in the same way.
        """
        return values.view(like.shape)

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""

    @abstractmethod
    def max(self, tensor: Tensor) -> Tensor:
        """Take the maximum of each element over the ranks, in place; the tensor has no NaN."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks in a new one, of shape (world_size, *shape).

        Args:
            tensor: contiguous tensor on the device, of type uint8 and the same shape on all ranks.
        """

    @abstractmethod
    def sum_async(self, numbers: Sequence[Any]) -> Work:
        """Begin to sum each of some numbers over the ranks, in float64.

        Args:
            numbers: Python numbers, and on a GPU also tensors of one element on the device.
        """

    @abstractmethod
    def broadcast_object(self, thing: T, source: int = 0) -> T:
        """Return the object (picklable) of one rank on every rank."""

    @abstractmethod
    def gather_object(self, thing: T) -> list[T]:
        """Return the objects (picklable) of all ranks on rank 0, and an empty list elsewhere."""

    @abstractmethod
    def all_gather_text(self, text: str) -> list[str]:
        """Wait for all ranks, and return the text of each, in the order of ranks.

        This is separate from all other exchanges: it does not disturb a rank that is in one.
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy the tensors of one rank to every rank, in place."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def explain(self, error: BaseException) -> HpctrainError | None:
        """Return an error that names the cause of an exception of this backend, or None."""
        return None

    def dump_to(self, folder: Path) -> tuple[str, str] | None:
        """Return how to ask for a dump of the latest collectives of this rank; None without dumps.

        Args:
            folder: folder for the dump.

        Returns:
            A FIFO, into which another process writes to ask for it, and the file of the dump.
        """
        return None

    @abstractmethod
    def close(self, failure: str | None = None) -> None:
        """Close the backend and free its resources.

        Args:
            failure: what failed on this rank, or None; after a failure the other ranks may be
                gone.
        """
