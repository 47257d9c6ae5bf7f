"""From bytes to numbers, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.errors import UsageError

__all__ = ["Normalize"]


class Normalize:
    """Batches of bytes as numbers of mean 0 and standard deviation 1, mirrored where it was drawn.

    Called with `(images uint8 (N, C, H, W), flips bool (N,), targets)`, or without the flips; gives
    `(images (N, C, H, W), targets)`. The host waits for nothing, but for the first batch on a
    device; images with the channels last stay so.

    Args:
        mean, std: of each channel, of pixels from 0 to 1.
        dtype: of the images.

    Raises:
        UsageError: there are not as many standard deviations above 0 as means.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> None:
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise UsageError(
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
        """The images and the targets.

        Args:
            batch: of an `ImageSet`, on any device.
        """
        images, *flips, targets = batch
        if flips:
            images = torch.where(flips[0].view(-1, 1, 1, 1), images.flip(3), images)
        scale, shift = self._on(images.device)
        return images.to(self.dtype).mul_(scale).add_(shift), targets

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What a byte is multiplied with, and what is then added, for each channel."""
        if device not in self._factors:
            mean = torch.tensor(self.mean, dtype=torch.float64)
            std = torch.tensor(self.std, dtype=torch.float64)
            scale, shift = (
                values.to(self.dtype).view(-1, 1, 1).to(device)
                for values in (1 / (255 * std), -mean / std)
            )
            self._factors[device] = scale, shift
        return self._factors[device]
