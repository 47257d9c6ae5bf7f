"""Transfer of batches to the device, at the same time as its computation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.process.pytree import map_tensors, tensors_in

__all__ = ["Placement", "feed"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and format of batches.

    Attributes:
        device: device used by this rank.
        dtype: type of the batches' floating-point tensors; None keeps their type.
        channels_last: whether images, of shape (samples, channels, height, width), get the
            channels-last memory format.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    channels_last: bool = False

    def __call__(self, batch: Any) -> Any:
        """Move a batch, of tensors in tuples, lists and dicts, to the device."""
        return map_tensors(self._place, batch)

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
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
    """Return an iterator over the batches on the device.

    A GPU copies and transforms them in a separate stream, while it still computes the previous
    step, because the host is ahead of the GPU.

    Args:
        batches: batches of a loader; in pinned memory for a GPU.
        placement: device and format of the batches.
        on_device: function that transforms each batch on the device.
    """
    if on_device is None and placement == Placement(torch.device("cpu")):
        return batches  # nothing changes

    def move(batch: Any) -> Any:
        batch = placement(batch)
        # `on_device` may change the type, as from bytes to numbers, so place its result again.
        return batch if on_device is None else placement(on_device(batch))

    if placement.device.type == "cuda":
        return _on_side_stream(batches, move, placement.device)
    return map(move, batches)


def _on_side_stream(
    batches: Iterator[Any], move: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = move(batch)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        # Otherwise the next batch could get this memory while the step still uses it.
        for tensor in tensors_in(moved):
            if tensor.is_cuda:
                tensor.record_stream(current)
        yield moved
