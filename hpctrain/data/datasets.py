"""Data sets of small images in MNIST's file format, given by name or folder.

Source: section "FILE FORMATS FOR THE MNIST DATABASE" of MNIST's home page, for the format.
"""

import fcntl
import gzip
import math
import os
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.cluster import env_vars
from hpctrain.data.shards.layouts import places, unreadable
from hpctrain.errors import UsageError
from hpctrain.process import seeds

__all__ = ["Images", "load"]

_BUNDLED = Path(__file__).parent / "digits"
_NAMES = ("digits", "fashion-mnist", "mnist", "synthetic")
_TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
# The folder itself, and the folders in which torchvision stores the files.
_BELOW = ("", "raw", "MNIST/raw", "FashionMNIST/raw")
_FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
_UNSIGNED_BYTES = 0x08


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and their classes, in memory.

    A sample is a float32 tensor of shape (1, height, width), normalized to mean 0 and standard
    deviation 1 over the training set, and an int64 class.

    Args:
        images: images, uint8 of shape (samples, height, width).
        targets: classes, int64 of shape (samples,).
        mean: mean of the training set's pixels.
        std: standard deviation of the training set's pixels.
    """

    random = False  # a sample is the same each time

    def __init__(self, images: Tensor, targets: Tensor, mean: float, std: float) -> None:
        self.images = images
        self.targets = targets
        self.mean = mean
        self.std = std

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.targets.max()) + 1

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape[1], self.images.shape[2]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several samples at once; torch's loaders call this for a batch."""
        chosen = torch.as_tensor(indices)
        images = self.images[chosen].unsqueeze(1).float().sub_(self.mean).div_(self.std)
        return list(zip(images, self.targets[chosen], strict=True))


def load(
    name: str, download: bool = False, env: Mapping[str, str] = os.environ
) -> tuple[Images, Images]:
    """Return the training set and the test set.

    Args:
        name: `digits`, `fashion-mnist`, `mnist`, `synthetic`, another name of a folder, or a path.
            A name is searched for in $HPCTRAIN_DATA (for a job's own copy), in the current folder,
            in /usr/share/datasets, and in the cache. The package itself has `digits`.
        download: download `mnist` or `fashion-mnist` to the cache if it is not found.
        env: environment with $HPCTRAIN_DATA and $HPCTRAIN_CACHE.

    Raises:
        UsageError: the data set is not found, cannot be read, or has damaged files.
    """
    if name == "synthetic":
        return _synthetic(4096, 0), _synthetic(1024, 1)
    try:
        files = _find(name, download, env)
        train_images, train_targets, test_images, test_targets = map(_idx, files)
    except OSError as error:
        raise unreadable(name, error, writes_cache=download) from None
    mean, std = _moments(train_images)
    sets = []
    for images, targets in ((train_images, train_targets), (test_images, test_targets)):
        if images.dim() != 3 or targets.shape != images.shape[:1]:
            raise UsageError(
                "HT513",
                f"{files[0].parent}: images of shape {tuple(images.shape)} and labels of shape "
                f"{tuple(targets.shape)}",
                "as many labels as images",
                "fetch the files again",
            )
        sets.append(Images(images, targets.long(), mean, std))
    return sets[0], sets[1]


def _find(name: str, download: bool, env: Mapping[str, str]) -> list[Path]:
    """Find the four files."""
    cache = Path(env.get(env_vars.CACHE) or "~/.cache/hpctrain").expanduser() / "data" / name
    searched = [*places(name, env), _BUNDLED if name == "digits" else cache]
    files = _among(searched)
    if not files and download and name in _TORCHVISION:
        files = _download(name, cache)
    if not files:
        raise UsageError(
            "HT510",
            f"--data {name}: no data set in {', '.join(map(str, dict.fromkeys(searched)))}",
            f"the files {', '.join(_FILES)} (or with .gz) in a folder, or one of "
            f"{', '.join(_NAMES)}",
            "apt-get install dataset-fashion-mnist" if name == "fashion-mnist" else "",
            "--download" if name in _TORCHVISION else "",
            "--data PATH of a folder that has them",
        )
    return files


def _among(searched: Sequence[Path]) -> list[Path]:
    """Return the four files of the first folder that has them, or whose subfolder has them."""
    for place in searched:
        for folder in (place / below for below in _BELOW):
            either = [(folder / name, folder / f"{name}.gz") for name in _FILES]
            files = [next(filter(Path.is_file, names), None) for names in either]
            if None not in files:
                return [file for file in files if file]
    return []


def _download(name: str, target: Path) -> list[Path]:
    """Download a data set once for all ranks that share the cache; no partial files remain."""
    try:
        from torchvision import datasets
    except ImportError:
        raise UsageError(
            "HT515",
            f"--download of {name}, but torchvision is not installed",
            "torchvision, which has the address of the data set",
            "pip install 'hpctrain[vision]'",
        ) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _among([target]):
            part = target.with_name(f".{name}.part")
            shutil.rmtree(part, ignore_errors=True)
            try:
                getattr(datasets, _TORCHVISION[name])(part, download=True)
            except (OSError, RuntimeError) as error:
                raise UsageError(
                    "HT514",
                    f"--download of {name} failed: {error}",
                    "a connection to the data set's home",
                    "download it on a machine with a connection, and pass its folder with --data "
                    "PATH",
                ) from None
            part.rename(target)
    return _among([target])


def _idx(path: Path) -> Tensor:
    """Read a tensor of unsigned bytes from a file in MNIST's format, with or without gzip."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dimensions = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        start = 4 + 4 * dimensions
        if zeros or kind != _UNSIGNED_BYTES or not 0 < math.prod(shape) == len(data) - start:
            raise ValueError(f"header of shape {shape}, but {len(data) - start} bytes follow")
    except (gzip.BadGzipFile, EOFError, struct.error, zlib.error, ValueError) as error:
        raise UsageError(
            "HT513",
            f"{path} is damaged: {error}",
            "unsigned bytes in MNIST's format, at least one",
            "fetch it again",
        ) from None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(shape)


def _moments(images: Tensor) -> tuple[float, float]:
    """Compute mean and standard deviation of the pixels from counts, equal on every machine."""
    counts = torch.bincount(images.flatten(), minlength=256).tolist()
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    square = sum(value * value * count for value, count in enumerate(counts)) / total
    return mean, math.sqrt(max(square - mean * mean, 1e-12))


def _synthetic(samples: int, part: int) -> Images:
    """Return noise with a bright bar whose position is the class, to time steps without files."""
    generator = torch.Generator().manual_seed(seeds.derive("synthetic", part))
    images = torch.randint(0, 128, (samples, 28, 28), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, 10, (samples,), generator=generator)
    rows = 4 + 2 * targets
    images[torch.arange(samples), rows] += 100
    return Images(images, targets, 67.0, 42.0)
