"""Samples that cannot be read: named, and up to a limit replaced."""

from typing import Any

from torch.utils.data import Dataset, Subset

from hpctrain.data.augmentation import draws
from hpctrain.errors import DataError, HpctrainError
from hpctrain.process.logging import logger

__all__ = ["SkipUnreadable"]


class SkipUnreadable(Dataset[Any]):
    """Data set that names a sample that cannot be read, and skips up to `limit` of them.

    For any data set with `__getitem__`, such as torchvision's `ImageFolder`. A sample is unreadable
    if reading or transforming it raises an exception. It is replaced by `instead`, and each process
    logs its name once. With a target that the loss and the metrics ignore, such as -100, it is not
    counted: torch's cross entropy and `session.classification` omit targets below 0.

    A missing file, a failing disk and missing memory are always errors.

    Each unreadable sample of the data set counts once, however often it is read. With at most
    `limit` of them in the data set, no epoch raises an error. With more, an epoch may pass and a
    later one may raise: each loader process counts only the samples that it has read itself. To
    detect this after one epoch, sum the ignored targets over all ranks, as examples/imagenet.py
    does.

    The mean loss of a micro-batch with only such samples is NaN (0/0). Targets as probabilities
    that are all 0 give 0.

    Args:
        dataset: data set with `__getitem__`.
        limit: number of samples of the data set that may be unreadable (default: 0).
        instead: sample that replaces an unreadable one, such as a grey image and the target -100.

    Example: `SkipUnreadable(ImageFolder("train", crop), 10, (torch.zeros(3, 224, 224), -100))`.
    """

    def __init__(self, dataset: Dataset[Any], limit: int = 0, instead: Any = None) -> None:
        self.dataset = dataset
        self.limit = limit
        self.instead = instead
        self.random = draws(dataset)
        self._skipped = set[int]()

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            DataError: the sample cannot be read, and this process has already skipped `limit`
                others.
            OSError: the file is missing, or its disk fails.
        """
        try:
            return self.dataset[index]
        except (MemoryError, HpctrainError):
            raise
        except Exception as error:  # decoders raise exceptions of all types
            # Only the kernel sets an errno: Pillow's OSErrors for damaged images have none.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            self._skip(index, error)
        return self.instead

    def _skip(self, index: int, error: Exception) -> None:
        """Count an unreadable sample."""
        if index in self._skipped:
            return
        name, reason = _name(self.dataset, index), f"{type(error).__name__}: {error}"
        if len(self._skipped) >= self.limit:
            key = "HT517.too-many-unreadable" if self.limit else "HT517.unreadable"
            values = {"limit": self.limit, "next_limit": max(2 * self.limit, 10)}
            raise DataError(key, name=name, reason=reason, **values) from error
        self._skipped.add(index)
        logger.warning("%s cannot be read, and is skipped: %s", name, reason)


def _name(dataset: Any, index: int) -> str:
    """Return the path of a sample, as torchvision's folders have it, or its index."""
    if isinstance(dataset, Subset):
        return _name(dataset.dataset, dataset.indices[index])
    try:
        path, *_ = dataset.samples[index]
    except (AttributeError, LookupError, TypeError, ValueError):
        path = None
    return path if isinstance(path, str) else f"sample {index} of {type(dataset).__name__}"
