"""Numbers, times and other values of a run as readable texts."""

import json
import time
from typing import Any

from hpctrain.cluster.texts import printable
from hpctrain.monitoring.drawing import is_number

__all__ = ["NOTHING", "duration", "moment", "number", "text"]

NOTHING = "–"
_MOST_CHARACTERS = 400


def number(value: Any) -> str:
    """Return a number as text: integers in full with commas, others with four or five digits."""
    if not is_number(value):
        return text(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.5g}"


def duration(seconds: Any) -> str:
    """Return seconds as text: 12.3 ms, 5.4 s, 1:02:03; a dash for an invalid value."""
    if not is_number(seconds) or not 0 <= seconds < 1e10:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    minutes, rest = divmod(round(seconds), 60)
    days, clock = minutes // 1440, f"{minutes // 60 % 24}:{minutes % 60:02}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def moment(seconds: Any) -> str:
    """Return Unix seconds as date and time in UTC; a dash for an invalid value."""
    if not is_number(seconds) or not 0 <= seconds < 2**35:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def text(value: Any) -> str:
    """Return any value of a file as one line, shortened if long; a dash for an empty value."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, float):
        return f"{value:.6g}"
    line = value if isinstance(value, str) else json.dumps(value)
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:_MOST_CHARACTERS]} … ({len(line):,} characters)"
    return printable(line)
