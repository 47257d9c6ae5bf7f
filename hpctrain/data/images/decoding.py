"""From an image file's bytes to pixels: the one place that knows decoders.

Measured on photographs of 500 × 375 (benchmarks/input.py): simplejpeg, torchvision.io and
torchcodec take the same time for whole images, and Pillow half as much again. Only simplejpeg and
Pillow can decode at a half, a quarter or an eighth of the size, and say when a file is damaged.
All four use libjpeg-turbo, and give the same pixels (of CMYK up to 1 of 255 apart).
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
    """The bytes are those of no image that can be decoded."""


class Decoder(Protocol):
    """What decodes images of all kinds."""

    def refuses(self, pixels: int) -> bool:
        """Whether an image of so many pixels is taken for an attack."""
        ...

    def size(self, data: bytes) -> tuple[int, int]:
        """Height and width, from the head of the file.

        Raises:
            CorruptError: it has none.
        """
        ...

    def decode(self, data: bytes, least: tuple[int, int] | None = None) -> Tensor:
        """The pixels, uint8 of shape (3, height, width), with the channels last in memory.

        Args:
            data: of the file.
            least: height and width that are enough: a JPEG is decoded at a half, a quarter or an
                eighth of its size where that is at least as much (default: at its own size).

        Raises:
            CorruptError: it is damaged.
        """
        ...


class Pillow:
    """Decodes all kinds of files. What it refuses is corrupt, as in torchvision's ImageFolder.

    Of an animation the first image; grey, CMYK and palettes become RGB, and transparency is left
    out; the orientation in EXIF is not heeded. Grey of 16 bits is scaled to 8, where ImageFolder
    has white for all from 255 on.

    Raises:
        UsageError: Pillow is not installed.
    """

    def __init__(self) -> None:
        self._image: Any = _module("PIL.Image")

    def __reduce__(self) -> tuple[type["Pillow"], tuple[()]]:
        return type(self), ()  # a module cannot be sent to a process

    def refuses(self, pixels: int) -> bool:
        """Whether it takes an image of so many for an attack, by its MAX_IMAGE_PIXELS."""
        most = self._image.MAX_IMAGE_PIXELS
        return most is not None and pixels > 2 * most

    def size(self, data: bytes) -> tuple[int, int]:
        """Height and width."""
        with self._opened(data) as image:
            return image.height, image.width

    def decode(self, data: bytes, least: tuple[int, int] | None = None) -> Tensor:
        """The pixels."""
        with self._opened(data) as image:
            if least is not None:
                part = _part(image.height, image.width, least)
                image.draft("RGB", (max(image.width // part, 1), max(image.height // part, 1)))
            rgb = (_of_8_bits(image) if _is_deep(image) else image).convert("RGB")
            pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
            return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)

    @contextlib.contextmanager
    def _opened(self, data: bytes) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of palettes, metadata, sizes
                with self._image.open(io.BytesIO(data)) as image:
                    yield image
        except MemoryError:
            raise
        except self._image.UnidentifiedImageError:
            raise CorruptError("no kind of image" if data else "it is empty") from None
        except Exception as error:  # its plugins raise all kinds
            raise CorruptError(str(error) or type(error).__name__) from None


def _is_deep(image: Any) -> bool:
    """Whether it is grey of 16 bits, which Pillow's "I", of 32 bits, is in PNG and PGM."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _of_8_bits(image: Any) -> Any:
    # To the nearest: what is behind the point is cut off.
    return image.convert("I").point(lambda value: value / 257 + 0.5)


class SimpleJpeg:
    """Decodes JPEG files, and leaves others, and those that it cannot, to Pillow.

    Those with so many pixels that Pillow refuses them are among these: a few bytes can claim more
    than fits into memory.

    Raises:
        UsageError: simplejpeg or Pillow is not installed.
    """

    def __init__(self) -> None:
        self._jpeg: Any = _module("simplejpeg")
        self._other = Pillow()

    def __reduce__(self) -> tuple[type["SimpleJpeg"], tuple[()]]:
        return type(self), ()

    def refuses(self, pixels: int) -> bool:
        """As Pillow."""
        return self._other.refuses(pixels)

    def size(self, data: bytes) -> tuple[int, int]:
        """Height and width."""
        try:
            height, width, *_ = self._jpeg.decode_jpeg_header(data)
        except ValueError:
            return self._other.size(data)
        if self.refuses(height * width):
            return self._other.size(data)  # says so
        return height, width

    def decode(self, data: bytes, least: tuple[int, int] | None = None) -> Tensor:
        """The pixels."""
        height, width = self.size(data)
        try:
            if least is not None:
                part = _part(height, width, least)
                height, width = -(-height // part), -(-width // part)
            pixels = self._jpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return self._other.decode(data, least)
        return torch.from_numpy(pixels).permute(2, 0, 1)


def _part(height: int, width: int, least: tuple[int, int]) -> int:
    """By what a side may be divided; other parts than these take longer than the whole.

    Source: simplejpeg's documentation of `min_factor`; only these have fast code in libjpeg-turbo.
    """
    for part in (8, 4, 2):
        if -(-height // part) >= least[0] and -(-width // part) >= least[1]:
            return part
    return 1


# In the order in which they are tried, the fastest first.
_DECODERS: dict[str, Callable[[], Decoder]] = {"simplejpeg": SimpleJpeg, "pillow": Pillow}


def find(name: str) -> Decoder:
    """A decoder by its name: `simplejpeg`, `pillow`, or `auto` for the first that is installed.

    Raises:
        UsageError: there is none of that name, or it is not installed.
    """
    if name != "auto":
        if name not in _DECODERS:
            raise UsageError(f"decoder={name!r}", f"auto, {' or '.join(_DECODERS)}")
        return _DECODERS[name]()
    with contextlib.suppress(UsageError):
        return SimpleJpeg()
    decoder = Pillow()
    logger.info("images are decoded by Pillow; faster: pip install 'hpctrain[vision]'")
    return decoder


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"images, and {name} cannot be imported: {error}",
            "what decodes them",
            "pip install 'hpctrain[vision]'",
        ) from None
