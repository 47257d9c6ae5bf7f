"""JPEG files in memory, with about as many pixels and bytes as those of ImageNet."""

import importlib
import io

import torch
import torch.nn.functional as F  # noqa: N812, its usual name

from hpctrain.errors import UsageError

__all__ = ["Pictures"]

_HEIGHT, _WIDTH, _QUALITY = 375, 500, 95
_FILES = 8
# Amplitude of the noise by grain size in pixels; the result is files of about 110 kB.
_GRAINS = {125: 0.2, 25: 0.25, 5: 0.15, 2: 0.4}


class Pictures:
    """Source of synthetic images in memory.

    Args:
        length: number of images; the same few files repeat.

    Attributes:
        classes: names of the classes.
        place: place of the images, for messages.

    Raises:
        UsageError: Pillow, which creates the images, is not installed.
    """

    place = "memory"

    def __init__(self, length: int) -> None:
        self.classes = ["one", "other"]
        self._length = length
        self._files = [_file(number) for number in range(_FILES)]

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> bytes:
        """Return the JPEG file of an image."""
        return self._files[index % _FILES]

    def target(self, index: int) -> int:
        """Return the class number of an image."""
        return index % len(self.classes)

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"picture {index}"

    @property
    def mean_bytes(self) -> float:
        """Mean size of a file in bytes."""
        return sum(map(len, self._files)) / _FILES


def _file(number: int) -> bytes:
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UsageError(
            "HT905",
            f"synthetic images, but Pillow cannot be imported: {error}",
            "Pillow, which creates them",
            "pip install 'hpctrain[vision]'",
        ) from None
    generator = torch.Generator().manual_seed(number)
    pixels = torch.zeros(1, 3, _HEIGHT, _WIDTH)
    for grain, amplitude in _GRAINS.items():
        noise = torch.rand(1, 3, _HEIGHT // grain, _WIDTH // grain, generator=generator)
        pixels += amplitude * F.interpolate(noise, (_HEIGHT, _WIDTH), mode="bilinear")
    buffer = io.BytesIO()
    rows = (pixels[0] * 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    image.fromarray(rows).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
