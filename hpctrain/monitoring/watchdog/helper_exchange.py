"""Exchange of observations between the helpers of several hosts, as files in the run directory.

    .hang-START/node1.0      observations of the helper that rank 0 started, written after silence
    .hang-START/judged       judgement of the first helper that judged

The ranks may hang because the file system does not respond, so a caller must not depend on a
response: see `Aside`.
"""

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from hpctrain.monitoring.watchdog.blame import Sighting
from hpctrain.rundir import create, replace

__all__ = ["Aside", "HelperExchange"]

_PREFIX = ".hang-"

T = TypeVar("T")


class HelperExchange:
    """The files that the helpers of one start exchange.

    Args:
        directory: run directory.
        key: unique name of the start.
        host: host of this helper.
        rank: rank that started this helper.
    """

    def __init__(self, directory: Path, key: str, host: str, rank: int) -> None:
        self._folder = directory / (_PREFIX + hashlib.sha256(key.encode()).hexdigest()[:16])
        self._own, self._judged = self._folder / f"{host}.{rank}", self._folder / "judged"

    def post(self, sightings: Sequence[Sighting]) -> None:
        """Publish the observations of this helper."""
        replace(self._own, json.dumps([asdict(sighting) for sighting in sightings]))

    def withdraw(self) -> None:
        """Remove the published observations of this helper."""
        self._own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other helpers still publish observations
            self._folder.rmdir()

    def others(self) -> list[Sighting]:
        """Return the observations that the other helpers have published."""
        sightings: list[Sighting] = []
        for path in self._folder.iterdir():
            if path not in (self._own, self._judged) and not path.name.startswith("."):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    sightings += [Sighting(**entry) for entry in json.loads(path.read_text())]
        return sightings

    def judged(self) -> bool:
        """Return whether a helper has published a judgement."""
        return self._judged.exists()

    def settle(self, judgement: str) -> str:
        """Publish a judgement; return it, or the earlier one of another helper."""
        with contextlib.suppress(FileExistsError):
            create(self._judged, judgement)
        return self._judged.read_text()

    def clear(self) -> None:
        """Remove the files of other starts."""
        for folder in self._folder.parent.glob(f"{_PREFIX}*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)


class Aside:
    """Runner for functions that may hang, for example in a file system; each runs in a thread.

    Args:
        seconds: seconds to wait for a result.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None

    def __call__(self, function: Callable[[], T]) -> T | None:
        """Return a function's result; None if it fails, is too slow, or an earlier one hangs."""
        if self._thread is not None and self._thread.is_alive():
            return None
        results: list[T] = []

        def call() -> None:
            with contextlib.suppress(OSError):
                results.append(function())

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()
        self._thread.join(self._seconds)
        return results[0] if results else None
