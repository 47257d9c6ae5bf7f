"""Weights & Biases."""

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.process import signals

__all__ = ["WandB"]

_SERVICE = "wandb-core"


class WandB(Tracker):
    """A run of W&B, in the project that `$WANDB_PROJECT` or else the script names.

    Its other variables are W&B's own: `WANDB_API_KEY`, `WANDB_MODE=offline`, `WANDB_ENTITY`, …

    Args:
        about: the run.
    """

    package = "wandb"

    def __init__(self, about: About) -> None:
        import wandb

        self._wandb, self._about = wandb, about

    def open(self) -> None:
        """Begin the run, or go on with it."""
        about = self._about
        known = about.known_as("wandb")
        name = known or secrets.token_hex(4)
        if known is None:
            about.remember("wandb", name)
        with signals.blocked():  # its service is a process
            self._run = self._wandb.init(
                id=name,
                resume="allow",
                name=about.directory.path.name,
                project=os.environ.get("WANDB_PROJECT") or about.name,
                dir=str(about.directory.path),
                config={name: _plain(value) for name, value in about.options.items()},
                # What ranks print is in their logs already; and standard error stays what it is.
                settings=self._wandb.Settings(console="off"),
            )
        # W&B's own step only grows, and drops what a resumed run takes again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """A row, over its step."""
        self._run.log({"step": step, "time": seconds, **values})

    def close(self, status: str) -> None:
        """Send what is left."""
        self._run.finish(exit_code=int(status == rundir.STATUS[rundir.FAILED]))

    def abandon(self) -> None:
        """Its service tries for as long as there is no answer, and W&B waits for it at the end."""
        for task in Path("/proc/self/task").glob("*"):
            for process in _children(task):
                with suppress(OSError):  # over by now
                    if Path("/proc", process, "comm").read_text().strip() == _SERVICE:
                        os.kill(int(process), signal.SIGKILL)
        sys.unraisablehook = partial(_unless_of_wandb, sys.unraisablehook)


def _children(task: Path) -> list[str]:
    """The processes that a thread has begun; none where it is over by now."""
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def _unless_of_wandb(otherwise: Callable[[Any], Any], error: Any) -> None:
    """Say nothing of W&B's own end, which misses its service."""
    if not getattr(error.object, "__module__", "").startswith("wandb."):
        otherwise(error)


def _plain(value: Any) -> Any:
    """An option as JSON has it; a script's own may be a path."""
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
