"""Which part of a tensor a rank holds, and which other ranks hold the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Extent"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of a tensor that a rank holds: a range of its elements in row-major order.

    Attributes:
        shape: shape of the whole tensor.
        start, stop: first element, and the one after the last.
        ranks: ranks that hold this part, in ascending order.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    ranks: Sequence[int]

    @classmethod
    def whole(cls, shape: Sequence[int], ranks: Sequence[int]) -> "Extent":
        """Return the extent of a tensor that ranks hold as a whole."""
        return cls(tuple(shape), 0, math.prod(shape), ranks)

    @property
    def all(self) -> bool:
        """Whether this is the whole tensor."""
        return self.start == 0 and self.stop == math.prod(self.shape)
