"""The settings that a backend gets before it opens. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BackendSettings"]


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The settings of any backend.

    Attributes:
        timeout: seconds that a collective may take.
        start_timeout: seconds that the connection of the ranks may take.
        accumulate: micro-batches per step.
        deterministic: whether repeated runs have to be bit-equal.
        loss_scaled: whether a loss scale may skip steps, which all ranks then have to skip alike.
        precision: name of the precision.
        own: options of this backend alone, by name.
    """

    timeout: float
    start_timeout: float
    accumulate: int = 1
    deterministic: bool = False
    loss_scaled: bool = False
    precision: str = "fp32"
    own: Mapping[str, Any] = field(default_factory=dict)
