"""Images of a source as samples of a data set."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.data.images import decoding
from hpctrain.data.images.cropping import CenterCrop, RandomResizedCrop
from hpctrain.data.shards import Source
from hpctrain.errors import DataError, UsageError
from hpctrain.process.logging import logger

__all__ = ["IGNORED", "ImageSet"]

#: The target of an image that could not be decoded: `ignore_index` of torch's cross entropy.
IGNORED = -100
_GREY = 128


class ImageSet(Dataset[tuple[Tensor, bool, int]]):
    """Images, each decoded and cut to one size when it is asked for.

    A sample is `(image uint8 (3, size, size), flip, target)`. A batch of the loader's is
    `(uint8 (N, 3, size, size), bool (N,), int64 (N,))`; `Normalize` makes numbers of it, on the
    device. The pixels follow from the file, the transform, the random numbers and the installed
    decoder.

    Images that cannot be decoded are an error unless `max_corrupt` allows some: then each is said
    by name, once by each process, is grey, and has the target -100, so it counts neither in torch's
    cross entropy nor in `session.classification`, whose `ignored` tells how many there were. The
    mean loss of a micro-batch of none but such images is NaN (0/0); a sum of losses over
    `max(1, images that count)`, or targets as probabilities that are all 0, give 0.

    What is counted are the images of the data set, each once however often it is met. Where it has
    no more corrupt ones than `max_corrupt`, there is no error, in no epoch. A process of a
    rank's loader knows of those that it has met itself, and more with each epoch: of a data set
    that has more, an epoch can pass, and one later can be the first in which a process has met too
    many. To find that out after one epoch, sum the targets below 0 over all ranks, as
    examples/imagenet.py does.

    Args:
        source: of `image_source`.
        transform: `RandomResizedCrop` or `CenterCrop`, or any callable of a file's bytes and a
            decoder that gives the uint8 image and whether it is to be mirrored. With `max_corrupt`
            it has a `size`, the pixels of a side.
        max_corrupt: how many images of the data set may be corrupt.
        decoder: `auto`, `simplejpeg` or `pillow`.

    Attributes:
        classes: the names of the classes.

    Raises:
        UsageError: the decoder is not there; or the transform has no `size`, and images may be
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
                f"ImageSet(max_corrupt={max_corrupt}), and a transform without a size",
                "its attribute `size`, the pixels of a side of what stands for a corrupt image",
                "transform.size = 224, or no max_corrupt",
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
        """A sample.

        Raises:
            DataError: the file cannot be read; or it is corrupt, and so are as many others that
                this process has met as may be.
        """
        data = self.source.read(index)
        try:
            image, flip = self.transform(data, self._decoder)
        except decoding.CorruptError as error:
            return self._replaced(index, str(error))
        return image, flip, self.source.target(index)

    def _replaced(self, index: int, why: str) -> tuple[Tensor, bool, int]:
        """What stands for a corrupt image."""
        name = self.source.name(index)
        if index not in self._corrupt:
            if len(self._corrupt) >= self.max_corrupt:
                raise DataError(
                    f"{name} is no image that can be decoded: {why}"
                    + (f"; {self.max_corrupt} others before it" if self.max_corrupt else ""),
                    f"at most {self.max_corrupt} such files in the whole data set"
                    if self.max_corrupt
                    else "an image",
                    f"fetch it again, or --max-corrupt {max(2 * self.max_corrupt, 10)} to go on "
                    "without such files, if the data set has no more of them",
                )
            self._corrupt.add(index)
            logger.warning("%s is no image that can be decoded, and is not counted: %s", name, why)
        size = self.transform.size
        return torch.full((3, size, size), _GREY, dtype=torch.uint8), False, IGNORED
