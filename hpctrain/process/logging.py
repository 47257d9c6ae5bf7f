"""Logging: rank 0 logs to standard error, and every rank to its own log file."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from hpctrain.errors import HpctrainError

__all__ = ["abandon", "add_log_file", "logger", "remove_log_file", "setup_logging", "warn"]

logger = logging.getLogger("hpctrain")


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to the current `sys.stderr`.

    Tests, notebooks and progress bars replace `sys.stderr`. A record with
    `extra={"screen": False}` is written only to log files.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "screen", True):
            self.stream = sys.stderr
            super().emit(record)


def setup_logging(rank: int) -> None:
    """Log to standard error: all messages on rank 0, only warnings and errors on other ranks."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in [h for h in logger.handlers if isinstance(h, _StandardError)]:
        logger.removeHandler(handler)
    handler = _StandardError()
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    name = "hpctrain" if rank == 0 else f"hpctrain rank {rank}"
    handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
    logger.addHandler(handler)


def warn(error: HpctrainError) -> None:
    """Log an error that ends nothing, and its fixes, in one line."""
    logger.warning("%s; fix: %s", error.found, "; or: ".join(error.fixes))


class _LogFile(logging.FileHandler):
    """A log file on a disk that may be full: the error is reported once and ends nothing."""

    _reported = False

    def begin(self) -> None:
        """Open the file; if that fails, each record tries it again."""
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            self.stream = open(  # noqa: SIM115, `close` closes it
                self.baseFilename, "a", encoding=self.encoding, errors=self.errors
            )
        except OSError:
            self.handleError(None)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if self.stream is None:
            self.begin()
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: object) -> None:  # noqa: N802, its name in logging
        """Report the first error in one line, instead of a traceback for each record."""
        del record
        if not self._reported:
            self._reported = True
            sys.stderr.write(
                f"hpctrain: {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n"
            )

    def close(self) -> None:
        """Close the file; ignore an error, as text that is not written yet is lost anyway."""
        with contextlib.suppress(OSError):
            super().close()


def add_log_file(path: Path) -> logging.Handler:
    """Write this rank's log also to a file, until `remove_log_file`."""
    # A file name that is not valid UTF-8 is written with backslash escapes.
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.begin()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return handler


def remove_log_file(handler: logging.Handler) -> None:
    """Close the log file of `add_log_file` and stop writing to it."""
    logger.removeHandler(handler)
    handler.close()


def abandon(stream: TextIO) -> None:
    """Discard further output to a stream whose reader has closed it, as `head` does.

    Otherwise Python would try to write the remaining output at exit, and fail.
    Source: the note on SIGPIPE in the documentation of Python's signal module.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
