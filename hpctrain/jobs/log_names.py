"""The names of logs, as sbatch expands them. Pure."""

import re
from collections.abc import Mapping

__all__ = ["filled"]

_PATTERN = re.compile(r"%(?:%|(?P<width>\d*)(?P<letter>[A-Za-z]))")


def filled(pattern: str, known: Mapping[str, str]) -> str:
    """What Slurm makes of a pattern.

    Source: "filename pattern" of sbatch(1).

    Args:
        pattern: such as logs/%x-%j.log.
        known: what its letters stand for; numbers are padded as the pattern says.

    Raises:
        LookupError: it has one that is not known; with that.
    """
    if "\\" in pattern:  # with which Slurm expands nothing
        return pattern.replace("\\", "")

    def expanded(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if match["letter"] not in known:
            raise LookupError(match[0])
        text = known[match["letter"]]
        return text.zfill(min(int(match["width"] or 0), 10)) if text.isdigit() else text

    return _PATTERN.sub(expanded, pattern)
