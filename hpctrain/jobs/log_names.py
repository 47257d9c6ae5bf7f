"""Names of log files, as sbatch expands them. Pure."""

import re
from collections.abc import Mapping

__all__ = ["filled"]

_PATTERN = re.compile(r"%(?:%|(?P<width>\d*)(?P<letter>[A-Za-z]))")


def filled(pattern: str, values: Mapping[str, str]) -> str:
    """Expand a pattern as Slurm does.

    Source: "filename pattern" of sbatch(1).

    Args:
        pattern: name with patterns, such as logs/%x-%j.log.
        values: values of the letters; numbers are padded as the pattern requires.

    Raises:
        LookupError: the pattern has an unknown letter; the error holds that part.
    """
    if "\\" in pattern:  # then Slurm expands nothing
        return pattern.replace("\\", "")

    def expanded(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if match["letter"] not in values:
            raise LookupError(match[0])
        text = values[match["letter"]]
        return text.zfill(min(int(match["width"] or 0), 10)) if text.isdigit() else text

    return _PATTERN.sub(expanded, pattern)
