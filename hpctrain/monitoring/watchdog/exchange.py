"""Where the helpers of several hosts tell each other what they see: files in the run directory.

    .hang-START/node1.0      what the helper that rank 0 started sees, once that is silence
    .hang-START/judged       what the first helper to judge has said

A file system that does not answer may be what the ranks hang in, so whoever uses this must be able
to do without an answer: see `Aside`.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from hpctrain.monitoring.watchdog.blame import Sighting
from hpctrain.rundir import create, replace

__all__ = ["Aside", "HelperExchange", "append"]

_PREFIX = ".hang-"
_JUDGED = "judged"

T = TypeVar("T")


class HelperExchange:
    """The files of one start.

    Args:
        directory: of the run.
        key: names the start.
        host: of this helper.
        rank: the one that started it.
    """

    def __init__(self, directory: Path, key: str, host: str, rank: int) -> None:
        self._directory = directory
        self._folder = directory / (_PREFIX + hashlib.sha256(key.encode()).hexdigest()[:16])
        self._own = self._folder / f"{host}.{rank}"

    def post(self, sightings: Sequence[Sighting]) -> None:
        """Tell the others what is seen here."""
        replace(self._own, json.dumps([asdict(one) for one in sightings]))

    def withdraw(self) -> None:
        """There is nothing to tell any more."""
        self._own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the others still have something to tell
            self._folder.rmdir()

    def others(self) -> list[Sighting]:
        """What the other helpers have told."""
        told: list[Sighting] = []
        for path in self._folder.iterdir():
            if path != self._own and not path.name.startswith(".") and path.name != _JUDGED:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    told += [Sighting(**one) for one in json.loads(path.read_text())]
        return told

    def judged(self) -> bool:
        """Whether somebody has found who is to blame."""
        return (self._folder / _JUDGED).exists()

    def settle(self, judgement: str) -> str:
        """Agree on one judgement: this one, unless another helper was faster."""
        try:
            create(self._folder / _JUDGED, judgement)
        except FileExistsError:
            return (self._folder / _JUDGED).read_text()
        return judgement

    def clear(self) -> None:
        """Remove what other starts have left."""
        for folder in self._directory.glob(f"{_PREFIX}*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)


class Aside:
    """Calls that may never return, each in a thread that is not waited for for long."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __call__(self, function: Callable[[], T], seconds: float) -> T | None:
        """What a function returns; None where it fails, takes longer, or one before still hangs.

        Args:
            function: that touches what may hang.
            seconds: to wait for it.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        answers: list[T] = []

        def call() -> None:
            with contextlib.suppress(OSError):
                answers.append(function())

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()
        self._thread.join(seconds)
        return answers[0] if answers else None


def append(path: Path, text: str) -> None:
    """Write to the end of a file, whole, as others may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
