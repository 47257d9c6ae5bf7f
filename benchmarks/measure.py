"""What the benchmarks share: spread, pairs, verdicts, and what machine it was. No torch.

All but the verdicts is what `hpctrain bench` measures with.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.bench.measure import describe, facts, order, summary, table

__all__ = ["describe", "facts", "order", "save", "summary", "table", "verdict"]


def verdict(figures: Mapping[str, float], limit: float) -> str:
    """Whether the median keeps to a limit, and whether the spread lets one say so."""
    said = "met" if figures["median"] <= limit else "missed"
    sure = figures["high"] <= limit or figures["low"] > limit
    return said if sure else f"{said}, within the noise"


def save(path: str | None, record: dict[str, Any]) -> None:
    """Write a record as JSON, where a file was named."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved to {path}")
