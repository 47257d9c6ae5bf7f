"""Which part of an image a model sees, at which size. All in bytes: uint8 in, uint8 out."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor

from hpctrain.data.images.decoding import CorruptError, Decoder
from hpctrain.errors import UsageError

__all__ = ["CenterCrop", "Crop", "RandomResizedCrop"]

Crop = Callable[[bytes, Decoder], tuple[Tensor, bool]]
_ATTEMPTS = 10


class RandomResizedCrop:
    """A part of random area, shape and place, at one size, and whether it is to be mirrored.

    The part is drawn first. A JPEG is then decoded at the smallest of its scales at which the part
    still has as many pixels as are wanted, and resized by bilinear interpolation with antialiasing.
    Random numbers are torch's.

    Source: the training of GoogLeNet in Szegedy et al., "Going Deeper with Convolutions" (arXiv
    1409.4842); ranges, attempts and what is taken after them as in torchvision's transform.

    Args:
        size: height and width in pixels.
        scale: least and greatest area of the part, over that of the image.
        ratio: least and greatest width of the part over its height.
        augment: called with the uint8 tensor (3, size, size); gives another one, as torchvision's
            v2 transforms do (default: none).
        flip: the probability of mirroring.

    Raises:
        UsageError: a range is empty, or the size is none.
    """

    random = True

    def __init__(
        self,
        size: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        augment: Callable[[Tensor], Tensor] | None = None,
        flip: float = 0.5,
    ) -> None:
        if size < 1 or not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise UsageError(
                f"RandomResizedCrop({size}, scale={scale}, ratio={ratio})",
                "a size of at least 1, 0 < scale ≤ 1 and 0 < ratio, the smaller one first",
            )
        self.size = size
        self.scale = scale
        self.ratio = ratio
        self.augment = augment
        self.flip = flip

    def __call__(self, data: bytes, decoder: Decoder) -> tuple[Tensor, bool]:
        """The part, uint8 (3, size, size), and whether it is to be mirrored.

        Args:
            data: an image file's bytes.
            decoder: for it.
        """
        whole = decoder.size(data)
        # All at once: each call costs microseconds.
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
        """Top, left, height and width of the part.

        Args:
            height, width: of the image.
            drawn: numbers from 0 to 1: an area and a shape for each attempt, then the place.
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
        # As much of the middle as the range of shapes allows.
        down, across = height, width
        if width / height < self.ratio[0]:
            down = min(max(round(width / self.ratio[0]), 1), height)
        elif width / height > self.ratio[1]:
            across = min(max(round(height * self.ratio[1]), 1), width)
        return (height - down) // 2, (width - across) // 2, down, across


class CenterCrop:
    """The middle of an image whose shorter side was brought to a size.

    Images are decoded whole, so that an evaluation is that of torchvision's references:
    `v2.Resize(resize)` and `v2.CenterCrop(size)` of the decoded bytes.

    Args:
        size: height and width in pixels.
        resize: the shorter side before, at least `size`.

    Raises:
        UsageError: the middle would be larger than the image.
    """

    random = False

    def __init__(self, size: int, resize: int) -> None:
        if not 1 <= size <= resize:
            raise UsageError(
                f"CenterCrop({size}, resize={resize})",
                "a size of at least 1, and a shorter side of at least that",
                f"CenterCrop({size}, resize={max(size, 1) * 8 // 7})",
            )
        self.size = size
        self.resize = resize

    def __call__(self, data: bytes, decoder: Decoder) -> tuple[Tensor, bool]:
        """The middle, uint8 (3, size, size), never to be mirrored.

        Args:
            data: an image file's bytes.
            decoder: for it.

        Raises:
            CorruptError: it is damaged; or it is so thin that it would have more pixels at the new
                size than the decoder takes.
        """
        pixels = decoder.decode(data)
        height, width = pixels.shape[1:]
        short = min(height, width)
        height, width = (self.resize * side // short for side in (height, width))
        if decoder.refuses(height * width):
            raise CorruptError(
                f"its shorter side of {short} pixels brought to {self.resize} gives an image of "
                f"{height} × {width} pixels"
            )
        image = _resized(pixels, height, width)
        # Half to even, as torchvision has it.
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return image[:, top : top + self.size, left : left + self.size].contiguous(), False


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    """An image at another size, as contiguous bytes.

    On photographs torch takes a third of the time that Pillow does, on one core, and least where
    the part lies in one piece of memory with the channels last.
    """
    if image.shape[1:] == (height, width):
        return image.contiguous()
    cut = image.unsqueeze(0).contiguous(memory_format=torch.channels_last)
    resized = F.interpolate(cut, (height, width), mode="bilinear", antialias=True)
    return resized.squeeze(0).contiguous()
