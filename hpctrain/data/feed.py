"""The way of batches to the device, beside what the device computes meanwhile."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.process.pytree import map_tensors

__all__ = ["Placement", "feed"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where batches go, and in which form.

    Attributes:
        device: of the rank.
        dtype: of their floating-point tensors; None leaves them.
        channels_last: whether their images, of shape (samples, channels, height, width), are laid
            out with the channels last.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    channels_last: bool = False

    @property
    def changes(self) -> bool:
        """Whether a batch of the loader's is not what it should be already."""
        return self.device.type != "cpu" or self.dtype is not None or self.channels_last

    def __call__(self, batch: Any) -> Any:
        """A batch, of tensors in tuples, lists and dicts, on the device."""
        return map_tensors(self._place, batch)

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else None
        images = self.channels_last and tensor.dim() == 4
        return tensor.to(
            device=self.device,
            dtype=dtype,
            non_blocking=True,
            memory_format=torch.channels_last if images else torch.preserve_format,
        )


def feed(
    batches: Iterator[Any], placement: Placement, on_device: Callable[[Any], Any] | None = None
) -> Iterator[Any]:
    """Batches as the loop gets them.

    A GPU copies them, and does what is to be done there, in a stream of its own: while it still
    computes the step before, since the host is ahead of it.

    Args:
        batches: of a loader; in pinned memory, where they go to a GPU.
        placement: where they go.
        on_device: makes of each batch there the one that is handed out.
    """
    if on_device is None and not placement.changes:
        return batches

    def move(batch: Any) -> Any:
        batch = placement(batch)
        # What is made there may be of another type than what came: bytes become numbers.
        return batch if on_device is None else placement(on_device(batch))

    if placement.device.type == "cuda":
        return _beside(batches, move, placement.device)
    return map(move, batches)


def _beside(
    batches: Iterator[Any], move: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = move(batch)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        # Or the memory would be given to the next batch while this one is still computed with.
        map_tensors(partial(_keep, current), moved)
        yield moved


def _keep(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
