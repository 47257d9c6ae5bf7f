"""The handwritten digits that come with the package, for first steps and tests.

Source: section "FILE FORMATS FOR THE MNIST DATABASE" of MNIST's home page, for the files' format.
"""

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Images", "digits"]

_FOLDER = Path(__file__).parent / "digits"


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


def digits() -> tuple[Images, Images]:
    """Return the training set and the test set of the digits: 1,437 and 360 images of 8 × 8.

    Example: `train_set, test_set = hpctrain.data.digits()`.
    """
    train, train_targets = _read("train-images-idx3-ubyte"), _read("train-labels-idx1-ubyte")
    test, test_targets = _read("t10k-images-idx3-ubyte"), _read("t10k-labels-idx1-ubyte")
    mean, std = _moments(train)
    return Images(train, train_targets.long(), mean, std), Images(
        test, test_targets.long(), mean, std
    )


def _read(name: str) -> Tensor:
    """Return the unsigned bytes of a file in MNIST's format: a header with the shape, the data."""
    data = gzip.decompress((_FOLDER / f"{name}.gz").read_bytes())
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[at : at + 4]) for at in range(4, start, 4)]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(shape)


def _moments(images: Tensor) -> tuple[float, float]:
    """Compute mean and standard deviation of the pixels from counts, equal on every machine."""
    counts = torch.bincount(images.flatten(), minlength=256).tolist()
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    square = sum(value * value * count for value, count in enumerate(counts)) / total
    return mean, math.sqrt(square - mean * mean)
