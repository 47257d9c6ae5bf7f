"""Conversion of images from bytes to normalized numbers, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.errors import UsageError

__all__ = ["Normalize"]


class Normalize:
    """Transform of batches from bytes to mean 0 and standard deviation 1, with the drawn flips.

    It takes `(images uint8 (N, C, H, W), flips bool (N,), targets)`, or the same without flips, and
    returns `(images (N, C, H, W), targets)`. The host waits only for the first batch on a device.
    Images with the channels last keep that format.

    Args:
        mean, std: mean and standard deviation of each channel, of pixels from 0 to 1.
        dtype: type of the images.

    Raises:
        UsageError: the numbers of means and standard deviations differ, or a standard deviation is
            not above 0.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> None:
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise UsageError(
                "HT516",
                f"Normalize(mean={tuple(mean)}, std={tuple(std)})",
                "a mean and a standard deviation above 0 for each channel",
            )
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.dtype = dtype
        self._factors: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, batch: tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the images and the targets.

        Args:
            batch: batch of an `ImageSet`, on any device.
        """
        images, *flips, targets = batch
        if flips:
            images = torch.where(flips[0].view(-1, 1, 1, 1), images.flip(3), images)
        scale, shift = self._on(images.device)
        return images.to(self.dtype).mul_(scale).add_(shift), targets

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the factor and the summand for the bytes of each channel."""
        if device not in self._factors:
            mean = torch.tensor(self.mean, dtype=torch.float64)
            std = torch.tensor(self.std, dtype=torch.float64)
            scale, shift = (
                values.to(self.dtype).view(-1, 1, 1).to(device)
                for values in (1 / (255 * std), -mean / std)
            )
            self._factors[device] = scale, shift
        return self._factors[device]
