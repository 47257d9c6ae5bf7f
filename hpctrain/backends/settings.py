"""What a backend is told before it opens. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a backend has to work, whichever it is.

    Attributes:
        timeout: seconds that a collective may take.
        start_timeout: seconds that it may take to connect the ranks.
        accumulate: micro-batches of a step.
        deterministic: whether repeats have to be bit-equal.
        loss_scaled: whether the ranks have to skip the same steps, as a loss scale lets them.
        own: the options of this backend alone, by their names without its own in front.
    """

    timeout: float
    start_timeout: float
    accumulate: int = 1
    deterministic: bool = False
    loss_scaled: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)
