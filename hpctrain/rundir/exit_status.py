"""The exit status file, in which rank 0 leaves code and reason for the process that started it."""

import json
import os
from pathlib import Path

from hpctrain.rundir import replace

__all__ = ["read_exit_status", "write_exit_status"]


def write_exit_status(path: str, code: int, reason: str) -> None:
    """Write the exit status file for the process that started the ranks.

    Args:
        path: value of $HPCTRAIN_EXIT_STATUS_FILE.
        code: one of `hpctrain.errors.exit_codes`.
        reason: one line for the user.
    """
    replace(Path(path), json.dumps({"code": code, "reason": reason}) + "\n")


def read_exit_status(path: str | os.PathLike[str]) -> tuple[int, str] | None:
    """Return code and reason of an exit status file; None if it is missing or incomplete."""
    try:
        exit_status = json.loads(Path(path).read_text())
        return int(exit_status["code"]), str(exit_status["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
