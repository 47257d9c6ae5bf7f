"""Tracker for Weights & Biases."""

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from hpctrain.cluster import system
from hpctrain.errors import exit_codes
from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.process import signals

__all__ = ["WandB"]

_SERVICE = "wandb-core"


class WandB(Tracker):
    """A run of W&B, in the project of `$WANDB_PROJECT` (default: script name).

    W&B itself reads its other variables: `WANDB_API_KEY`, `WANDB_MODE=offline`, `WANDB_ENTITY`, …

    Args:
        about: description of the run.
    """

    package = "wandb"

    def __init__(self, about: About) -> None:
        import wandb

        self._wandb, self._about = wandb, about

    def open(self) -> None:
        """Begin the run, or continue it."""
        about = self._about
        earlier = about.known_as("wandb")
        run_id = earlier or secrets.token_hex(4)
        if earlier is None:
            about.remember("wandb", run_id)
        with signals.blocked():  # W&B starts its service as a process
            self._run = self._wandb.init(
                id=run_id,
                resume="allow",
                name=about.directory.path.name,
                project=os.environ.get("WANDB_PROJECT") or about.name,
                dir=str(about.directory.path),
                config={name: _plain(value) for name, value in about.options.items()},
                # The logs already contain the ranks' output; standard error stays unchanged.
                settings=self._wandb.Settings(console="off"),
            )
        # W&B's own step only increases, so it would drop the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Record a row of metrics at its step."""
        self._run.log({"step": step, "time": seconds, **values})

    def close(self, status: str) -> None:
        """Send the remaining data and end the run."""
        self._run.finish(exit_code=int(status == exit_codes.STATUS[exit_codes.FAILED]))

    def abandon(self) -> None:
        """Kill W&B's service: it retries without end, and W&B waits for it at the exit."""
        for process in system.family(os.getpid()):
            if system.name(process) == _SERVICE:
                with suppress(OSError):  # already ended
                    os.kill(process, signal.SIGKILL)
        sys.unraisablehook = partial(_hide_wandb_errors, sys.unraisablehook)


def _hide_wandb_errors(hook: Callable[[Any], Any], error: Any) -> None:
    """Hide errors of W&B's own exit, which fails without its service."""
    if not getattr(error.object, "__module__", "").startswith("wandb."):
        hook(error)


def _plain(value: Any) -> Any:
    """Return an option as a JSON value; a script's own option may be a path."""
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
