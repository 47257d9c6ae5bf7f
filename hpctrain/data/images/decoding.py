"""Decoders from the bytes of an image file to pixels.

Measured on photographs of 500 × 375 (benchmarks/input.py): simplejpeg, torchvision.io and
torchcodec need the same time for whole images, and Pillow 1.5 times as much. Only simplejpeg and
Pillow can decode at a half, a quarter or an eighth of the size, and report a damaged file.
All four use libjpeg-turbo, and give the same pixels (up to 1 of 255 apart for CMYK).
"""

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["CorruptError", "Decoder", "find"]


class CorruptError(Exception):
    """Error for bytes that cannot be decoded as an image."""


class Decoder(Protocol):
    """Interface of a decoder for images of all formats."""

    def size(self, data: bytes) -> tuple[int, int]:
        """Return height and width, from the header of the file.

        Raises:
            CorruptError: the bytes have no valid header.
        """
        ...

    def decode(self, data: bytes, least: tuple[int, int] | None = None) -> Tensor:
        """Return the pixels, uint8 of shape (3, height, width), with the channels last in memory.

        Args:
            data: bytes of the file.
            least: smallest sufficient height and width: a JPEG is decoded at a half, a quarter or
                an eighth of its size if that is at least as large (default: at full size).

        Raises:
            CorruptError: the image is damaged.
        """
        ...


class Pillow:
    """Decoder for all formats. Files that it refuses are corrupt, as in torchvision's ImageFolder.

    It reads the first image of an animation, converts grey, CMYK and palettes to RGB, and drops
    transparency. It ignores the orientation in EXIF. It scales 16-bit grey to 8 bits, where
    ImageFolder makes all values from 255 on white.

    Raises:
        UsageError: Pillow is not installed.
    """

    def __init__(self) -> None:
        _module("PIL.Image")

    def refuses(self, pixels: int) -> bool:
        """Return whether Pillow's MAX_IMAGE_PIXELS refuses so many pixels as a possible attack."""
        most = _module("PIL.Image").MAX_IMAGE_PIXELS
        return most is not None and pixels > 2 * most

    def size(self, data: bytes) -> tuple[int, int]:
        """Return height and width."""
        with self._opened(data) as image:
            return image.height, image.width

    def decode(self, data: bytes, least: tuple[int, int] | None = None) -> Tensor:
        """Return the pixels."""
        with self._opened(data) as image:
            if least is not None:
                part = _part(image.height, image.width, least)
                image.draft("RGB", (max(image.width // part, 1), max(image.height // part, 1)))
            rgb = (_of_8_bits(image) if _is_deep(image) else image).convert("RGB")
            pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
            return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)

    @contextlib.contextmanager
    def _opened(self, data: bytes) -> Any:
        module = _module("PIL.Image")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about palettes, metadata, sizes
                with module.open(io.BytesIO(data)) as image:
                    yield image
        except MemoryError:
            raise
        except module.UnidentifiedImageError:
            raise CorruptError("unknown image format" if data else "it is empty") from None
        except Exception as error:  # Pillow's plugins raise exceptions of all types
            raise CorruptError(str(error) or type(error).__name__) from None


def _is_deep(image: Any) -> bool:
    """Return whether an image is 16-bit grey; for PNG and PGM, Pillow's 32-bit "I" means that."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _of_8_bits(image: Any) -> Any:
    # Rounds to the nearest, because the fraction is cut off.
    return image.convert("I").point(lambda value: value / 257 + 0.5)


class SimpleJpeg:
    """Decoder for JPEG files; it passes other files, and those that it cannot decode, to Pillow.

    It also passes JPEG files whose number of pixels Pillow refuses: a few bytes can declare an
    image that does not fit into memory.

    Raises:
        UsageError: simplejpeg or Pillow is not installed.
    """

    def __init__(self) -> None:
        _module("simplejpeg")
        self._other = Pillow()

    def size(self, data: bytes) -> tuple[int, int]:
        """Return height and width."""
        with contextlib.suppress(ValueError):
            height, width, *_ = _module("simplejpeg").decode_jpeg_header(data)
            if not self._other.refuses(height * width):
                return height, width
        return self._other.size(data)  # raises the error, if there are too many pixels

    def decode(self, data: bytes, least: tuple[int, int] | None = None) -> Tensor:
        """Return the pixels."""
        height, width = self.size(data)
        try:
            if least is not None:
                part = _part(height, width, least)
                height, width = -(-height // part), -(-width // part)
            decode = _module("simplejpeg").decode_jpeg
            pixels = decode(data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return self._other.decode(data, least)
        return torch.from_numpy(pixels).permute(2, 0, 1)


def _part(height: int, width: int, least: tuple[int, int]) -> int:
    """Return the divisor of the sides for decoding; other divisors take longer than full size.

    Source: simplejpeg's documentation of `min_factor`; only these have fast code in libjpeg-turbo.
    """
    for part in (8, 4, 2):
        if -(-height // part) >= least[0] and -(-width // part) >= least[1]:
            return part
    return 1


# Decoders by name, the fastest first.
_DECODERS: dict[str, Callable[[], Decoder]] = {"simplejpeg": SimpleJpeg, "pillow": Pillow}


def find(name: str) -> Decoder:
    """Return a decoder: `simplejpeg`, `pillow`, or `auto` for the first that is installed.

    Raises:
        UsageError: the name is unknown, or the decoder is not installed.
    """
    if name != "auto":
        if name not in _DECODERS:
            raise UsageError("HT516", f"decoder={name!r}", f"auto, {' or '.join(_DECODERS)}")
        return _DECODERS[name]()
    with contextlib.suppress(UsageError):
        return SimpleJpeg()
    decoder = Pillow()
    logger.info("images are decoded by Pillow; faster: pip install 'hpctrain[vision]'")
    return decoder


def _module(name: str) -> Any:
    """Import a module where it is used, as a decoder that holds a module could not be pickled."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            "HT515",
            f"images are read, but {name} cannot be imported: {error}",
            "a package that decodes images",
            "pip install 'hpctrain[vision]'",
        ) from None
