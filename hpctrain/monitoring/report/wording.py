"""Numbers, times and other values of a run as readable texts."""

import json
import math
import time
from typing import Any

from hpctrain.cluster.texts import printable
from hpctrain.monitoring import drawing

__all__ = ["duration", "moment", "number", "text"]

_MOST_CHARACTERS = 400


def number(value: float) -> str:
    """Return a number as text: integers in full with commas, others with four or five digits."""
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    try:
        found = float(value)
    except OverflowError:
        return "more than 1e308"
    if math.isfinite(found) and 1000 <= abs(found) < 1e15:
        return f"{found:,.0f}"
    return f"{found:.5g}" if math.isfinite(found) else str(found)


def duration(seconds: Any) -> str:
    """Return seconds as text: 12.3 ms, 5.4 s, 1:02:03; a dash for an invalid value."""
    if not drawing.is_number(seconds) or not 0 <= seconds < 1e10:
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    clock = f"{whole % 86400 // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    days = whole // 86400
    return f"{days} d {clock}" if days else clock


def moment(seconds: Any) -> str:
    """Return Unix seconds as date and time in UTC; a dash for an invalid value."""
    if not drawing.is_number(seconds) or not 0 <= seconds < 2**35:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _whole(value: int) -> str:
    """Return an integer as text; Python converts no integer of more than 4300 digits."""
    return str(value) if abs(value) < 10**15 else number(value)


def text(value: Any) -> str:
    """Return any value of a file as one line, shortened if long; a dash for an empty value."""
    if value is None or value == "":
        return "–"
    if drawing.is_number(value):
        return f"{value:.6g}" if isinstance(value, float) else _whole(value)
    line = value if isinstance(value, str) else json.dumps(value)
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:_MOST_CHARACTERS]} … ({len(line):,} characters)"
    return printable(line)
