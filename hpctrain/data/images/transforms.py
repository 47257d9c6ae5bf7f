"""Transforms of images: crops, resized for a model, as uint8; and normalization on the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor

from hpctrain.data.images.decoding import Decoder
from hpctrain.errors import UsageError

__all__ = ["CenterCrop", "Normalize", "RandomResizedCrop"]

_ATTEMPTS = 10


@dataclass(eq=False)
class RandomResizedCrop:
    """Crop of random area, shape and position, resized to one size, with a random flip.

    The crop is drawn first. A JPEG is then decoded at the smallest of its scales at which the crop
    still has enough pixels, and resized by bilinear interpolation with antialiasing. The random
    numbers come from torch.

    Source: the training of GoogLeNet in Szegedy et al., "Going Deeper with Convolutions" (arXiv
    1409.4842); ranges, attempts and the fallback after them as in torchvision's transform.

    Args:
        size: height and width of the output, in pixels.
        scale: smallest and largest area of the crop, relative to the area of the image.
        ratio: smallest and largest ratio of the crop's width to its height.
        augment: function from a uint8 tensor (3, size, size) to another one, such as torchvision's
            v2 transforms (default: none).
        flip: probability of a flip.

    Raises:
        UsageError: a range is empty, or the size is below 1.
    """

    random = True

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    augment: Callable[[Tensor], Tensor] | None = None
    flip: float = 0.5

    def __post_init__(self) -> None:
        size, scale, ratio = self.size, self.scale, self.ratio
        if size < 1 or not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise UsageError(
                "HT516",
                f"RandomResizedCrop({size}, scale={scale}, ratio={ratio})",
                "a size of at least 1, 0 < scale ≤ 1 and 0 < ratio, the smaller one first",
            )

    def __call__(self, data: bytes, decoder: Decoder) -> tuple[Tensor, bool]:
        """Return the crop, uint8 (3, size, size), and whether to flip it.

        Args:
            data: bytes of an image file.
            decoder: decoder for the bytes.
        """
        whole = decoder.size(data)
        # One call for all numbers, because each call costs microseconds.
        drawn = torch.rand(2 * _ATTEMPTS + 3, dtype=torch.float64).tolist()
        top, left, height, width = self.part(*whole, drawn)
        least = (
            math.ceil(self.size * whole[0] / height),
            math.ceil(self.size * whole[1] / width),
        )
        pixels = decoder.decode(data, least)
        down, across = pixels.shape[1] / whole[0], pixels.shape[2] / whole[1]
        cut = pixels[
            :,
            round(top * down) : max(round((top + height) * down), round(top * down) + 1),
            round(left * across) : max(round((left + width) * across), round(left * across) + 1),
        ]
        image = _resized(cut, self.size, self.size)
        if self.augment is not None:
            image = self.augment(image)
        return image, drawn[-1] < self.flip

    def part(self, height: int, width: int, drawn: list[float]) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the crop.

        Args:
            height: height of the image, in pixels.
            width: width of the image, in pixels.
            drawn: numbers from 0 to 1: an area and a shape for each attempt, then the position.
        """
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(_ATTEMPTS):
            area = height * width * _between(*self.scale, drawn[2 * attempt])
            shape = math.exp(_between(low, high, drawn[2 * attempt + 1]))
            across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < across <= width and 0 < down <= height:
                top, left = drawn[2 * _ATTEMPTS : 2 * _ATTEMPTS + 2]
                return (
                    int(top * (height - down + 1)),
                    int(left * (width - across + 1)),
                    down,
                    across,
                )
        # Fallback: the largest central crop that the range of shapes allows.
        down, across = height, width
        if width / height < self.ratio[0]:
            down = min(max(round(width / self.ratio[0]), 1), height)
        elif width / height > self.ratio[1]:
            across = min(max(round(height * self.ratio[1]), 1), width)
        return (height - down) // 2, (width - across) // 2, down, across


class CenterCrop:
    """Central crop of an image, after its shorter side is resized.

    Images are decoded at full size, so an evaluation equals that of torchvision's references:
    `v2.Resize(resize)` and `v2.CenterCrop(size)` of the decoded bytes.

    Args:
        size: height and width of the output, in pixels.
        resize: length of the shorter side before the crop, in pixels, at least `size`.

    Raises:
        UsageError: the crop would be larger than the image, or empty.
    """

    random = False

    def __init__(self, size: int, resize: int) -> None:
        if not 1 <= size <= resize:
            raise UsageError(
                "HT516",
                f"CenterCrop({size}, resize={resize})",
                "a size of at least 1, and a shorter side of at least that",
                f"CenterCrop({size}, resize={max(size, 1) * 8 // 7})",
            )
        self.size = size
        self.resize = resize

    def __call__(self, data: bytes, decoder: Decoder) -> tuple[Tensor, bool]:
        """Return the central crop, uint8 (3, size, size), and False for no flip.

        Args:
            data: bytes of an image file.
            decoder: decoder for the bytes.
        """
        pixels = decoder.decode(data)
        height, width = pixels.shape[1:]
        short = min(height, width)
        height, width = (self.resize * side // short for side in (height, width))
        image = _resized(pixels, height, width)
        # Round half to even, as torchvision does.
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return image[:, top : top + self.size, left : left + self.size].contiguous(), False


class Normalize:
    """Transform of batches from bytes to mean 0 and standard deviation 1, with the drawn flips.

    It takes `(images uint8 (N, C, H, W), flips bool (N,), targets)`, or the same without flips, and
    returns `(images (N, C, H, W), targets)`. The host waits only for the first batch on a device.
    Images with the channels last keep that format.

    Args:
        mean: mean of each channel, of pixels from 0 to 1.
        std: standard deviation of each channel.
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


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    """Resize an image; return contiguous bytes.

    On photographs torch needs a third of Pillow's time, on one core. It is fastest if the crop is
    contiguous in memory with the channels last.
    """
    if image.shape[1:] == (height, width):
        return image.contiguous()
    cut = image.unsqueeze(0).contiguous(memory_format=torch.channels_last)
    resized = F.interpolate(cut, (height, width), mode="bilinear", antialias=True)
    return resized.squeeze(0).contiguous()
