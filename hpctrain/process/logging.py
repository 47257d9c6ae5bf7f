"""Who speaks: rank 0 to people, every rank to a log file of its own."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["abandon", "add_log_file", "logger", "remove_log_file", "setup_logging"]

logger = logging.getLogger("hpctrain")


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what `sys.stderr` is at the time: tests, notebooks and progress bars replace it.

    A record with `extra={"screen": False}` is for log files alone.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "screen", True):
            self.stream = sys.stderr
            super().emit(record)


def setup_logging(rank: int) -> None:
    """Rank 0 says everything on standard error; the others say only what is wrong."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in [h for h in logger.handlers if isinstance(h, _StandardError)]:
        logger.removeHandler(handler)
    handler = _StandardError()
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    name = "hpctrain" if rank == 0 else f"hpctrain rank {rank}"
    handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
    logger.addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log that may come to a full disk: said once, and no reason to end anything."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, its name in logging
        """Instead of a traceback for each line."""
        del record
        if not self._said:
            self._said = True
            sys.stderr.write(
                f"hpctrain: {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n"
            )

    def close(self) -> None:
        """What is not written by now is lost."""
        with contextlib.suppress(OSError):
            super().close()


def add_log_file(path: Path) -> logging.Handler:
    """Write all that this rank says to a file as well, until `drop`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that is no UTF-8 is shown as well as it can be.
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return handler


def remove_log_file(handler: logging.Handler) -> None:
    """Write no more to the file of `keep`."""
    logger.removeHandler(handler)
    handler.close()


def abandon(stream: TextIO) -> None:
    """Let what is written to a stream go nowhere: its reader has left, as `head` does.

    Otherwise Python would try to write the rest at its end, and fail.
    Source: the note on SIGPIPE in the documentation of Python's signal module.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
