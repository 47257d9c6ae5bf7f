"""Data set of the images of a source."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.data.images import decoding
from hpctrain.data.images.transforms import CenterCrop, RandomResizedCrop
from hpctrain.data.shards.layouts import Source
from hpctrain.errors import DataError, UsageError
from hpctrain.process.logging import logger

__all__ = ["IGNORED", "ImageSet"]

#: Target of an image that cannot be decoded: the `ignore_index` of torch's cross entropy.
IGNORED = -100
_GREY = 128


class ImageSet(Dataset[tuple[Tensor, bool, int]]):
    """Data set that decodes and crops each image to one size when it is read.

    A sample is `(image uint8 (3, size, size), flip, target)`. A batch of the loader is
    `(uint8 (N, 3, size, size), bool (N,), int64 (N,))`; `Normalize` converts it to numbers on the
    device. The pixels depend on the file, the transform, the random numbers and the installed
    decoder.

    An image that cannot be decoded raises an error, unless `max_corrupt` allows some. Then each
    process logs the name of the image once. The image is grey and has the target -100, so torch's
    cross entropy and `session.classification` do not count it; the latter's `ignored` is the
    number of such images. The mean loss of a micro-batch with only such images is NaN (0/0). A sum
    of losses divided by `max(1, images that count)`, or targets as probabilities that are all 0,
    gives 0.

    Each corrupt image of the data set counts once, however often it is read. With at most
    `max_corrupt` corrupt images in the data set, no epoch raises an error. With more, an epoch may
    pass and a later one may raise: each loader process counts only the images that it has read
    itself, which become more with each epoch. To detect this after one epoch, sum the targets
    below 0 over all ranks, as examples/imagenet.py does.

    Args:
        source: source from `image_source`.
        transform: `RandomResizedCrop` or `CenterCrop`, or any callable from a file's bytes and a
            decoder to the uint8 image and whether to flip it. With `max_corrupt` it needs a
            `size`, the pixels of a side.
        max_corrupt: number of images of the data set that may be corrupt.
        decoder: `auto`, `simplejpeg` or `pillow`.

    Attributes:
        classes: names of the classes.

    Raises:
        UsageError: the decoder is not installed; or the transform has no `size`, and images may be
            corrupt.
    """

    def __init__(
        self,
        source: Source,
        transform: RandomResizedCrop | CenterCrop,
        max_corrupt: int = 0,
        decoder: str = "auto",
    ) -> None:
        if max_corrupt and not isinstance(getattr(transform, "size", None), int):
            raise UsageError(
                "HT516",
                f"ImageSet(max_corrupt={max_corrupt}), but a transform without a size",
                "an attribute `size`: side length in pixels of the replacement of a corrupt image",
                "transform.size = 224",
                "leave max_corrupt out",
            )
        self.source = source
        self.transform = transform
        self.max_corrupt = max_corrupt
        self.random = getattr(transform, "random", True)
        self.classes = source.classes
        self._decoder = decoding.find(decoder)
        self._corrupt = set[int]()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, bool, int]:
        """Return a sample.

        Raises:
            DataError: the file cannot be read; or it is corrupt, and this process has already read
                `max_corrupt` other corrupt images.
        """
        data = self.source.read(index)
        try:
            image, flip = self.transform(data, self._decoder)
        except decoding.CorruptError as error:
            return self._replaced(index, str(error))
        return image, flip, self.source.target(index)

    def _replaced(self, index: int, reason: str) -> tuple[Tensor, bool, int]:
        """Return the replacement of a corrupt image."""
        name = self.source.name(index)
        if index not in self._corrupt:
            if len(self._corrupt) >= self.max_corrupt:
                raise DataError(
                    "HT517",
                    f"{name} is no image that can be decoded: {reason}"
                    + (f"; {self.max_corrupt} other images before it" if self.max_corrupt else ""),
                    f"at most {self.max_corrupt} such files in the whole data set"
                    if self.max_corrupt
                    else "an image",
                    "fetch it again",
                    f"--max-corrupt {max(2 * self.max_corrupt, 10)} to continue without such "
                    "files, if the data set has no more of them",
                )
            self._corrupt.add(index)
            logger.warning(
                "%s is no image that can be decoded, and is not counted: %s", name, reason
            )
        size = self.transform.size
        return torch.full((3, size, size), _GREY, dtype=torch.uint8), False, IGNORED
