"""Trackers, which receive rows of metrics besides metrics.jsonl; each has its own module.

To add one, write a module with a subclass of `Tracker`, and add a line to `TRACKERS`.
"""

import contextlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError, exit_codes
from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.monitoring.trackers.mlflow import MLflow
from hpctrain.monitoring.trackers.outlet import Outlet
from hpctrain.monitoring.trackers.tensorboard import TensorBoard
from hpctrain.monitoring.trackers.wandb import WandB
from hpctrain.process.logging import logger

__all__ = ["TRACKERS", "About", "Tracker", "Tracking", "parse"]

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}

# Time for networks at the end of a run. A run that is asked to stop may be killed at any moment,
# and still has to write its exit status file.
_SECONDS_AT_THE_END = 30.0
_SECONDS_TO_STOP = 3.0
# Share of the time-out after which the waiting other ranks consider this rank lost.
_PART_OF_THE_TIMEOUT = 0.25
# Shorter waits are not logged.
_SECONDS_UNLOGGED = 1.0


def parse(text: str | None, here: bool) -> list[str]:
    """Return the names in `--track`, each once.

    Args:
        text: value of the option; None without it.
        here: whether this process uses the trackers, so that their packages must be installed.

    Raises:
        UsageError: a tracker is unknown, or its package is missing.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(","))) if text else []
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                "HT652",
                f"--track {text}: no tracker is called {name!r}",
                f"one or several of {', '.join(TRACKERS)}",
                f"--track {nearest(name, TRACKERS) or next(iter(TRACKERS))}",
            )
        if here and not _installed(name):
            raise UsageError(
                "HT651",
                f"--track {name}, but its package is not installed",
                f"a {name} that can be imported",
                f"pip install 'hpctrain[{name}]'",
            )
    return names


def _installed(name: str) -> bool:
    # A folder with the package's name, such as W&B's own, would count as a package without origin.
    spec = importlib.util.find_spec(TRACKERS[name].package)
    return spec is not None and spec.origin is not None


class Tracking:
    """All trackers of a run, each in its own thread; used on rank 0 only.

    A tracker that fails is logged once, and neither ends nor slows the training.

    Args:
        names: keys of `TRACKERS`.
        about: description of the run.
    """

    def __init__(self, names: Sequence[str], about: About) -> None:
        self._outlets = [Outlet(name, TRACKERS[name], about) for name in names]

    def row(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics.jsonl."""
        for outlet in self._outlets:
            outlet.put(row)

    def close(self, status: str, timeout: float) -> None:
        """End all trackers and wait for them, with one time limit for all; a signal ends the wait.

        Args:
            status: status of the run, as in summary.json.
            timeout: seconds after which other ranks consider this rank lost.
        """
        for outlet in self._outlets:
            outlet.end(status)
        done = status == exit_codes.STATUS[exit_codes.DONE]
        limit = _SECONDS_AT_THE_END if done else _SECONDS_TO_STOP
        seconds = min(limit, timeout * _PART_OF_THE_TIMEOUT)
        begun = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # raised by signal handlers
            late = self._late(begun + min(seconds, _SECONDS_UNLOGGED))
            if late and seconds > _SECONDS_UNLOGGED:
                logger.info("waiting up to %.0f s for --track %s; Ctrl-C ends it", seconds, late)
            self._late(begun + seconds)
        if late := self._late(begun):
            logger.warning(
                "--track %s has not taken all rows within %.0f s; metrics.jsonl has them",
                late,
                time.monotonic() - begun,
            )
        for outlet in self._outlets:
            outlet.abandon()

    def _late(self, end: float) -> str:
        """Return the names of trackers that do not finish until a time of `time.monotonic`."""
        finished = [outlet.wait(max(0.0, end - time.monotonic())) for outlet in self._outlets]
        return ",".join(
            outlet.name for outlet, over in zip(self._outlets, finished, strict=True) if not over
        )
