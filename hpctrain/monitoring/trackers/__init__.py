"""Trackers, which receive rows of metrics besides metrics.jsonl; each has its own module.

To add one, write a module with a subclass of `Tracker`, and add a line to `TRACKERS`. A package
outside of hpctrain adds one by an entry point of the group `hpctrain.trackers`.
"""

import importlib.util

from hpctrain.cluster import entry_points
from hpctrain.cluster.texts import listed, nearest
from hpctrain.errors import UsageError
from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.monitoring.trackers.mlflow import MLflow
from hpctrain.monitoring.trackers.tensorboard import TensorBoard
from hpctrain.monitoring.trackers.tracking import Tracking
from hpctrain.monitoring.trackers.wandb import WandB

__all__ = ["TRACKERS", "About", "Tracker", "Tracking", "find"]

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def find(text: str | None) -> dict[str, type[Tracker]]:
    """Return the trackers in `--track` by name.

    Args:
        text: value of the option; None without it.

    Raises:
        UsageError: a tracker is unknown, its package is missing, or another package adds a tracker
            that cannot be used.
    """
    if not text:
        return {}
    names = [name.strip() for name in text.split(",")]
    kind: type[Tracker] = Tracker  # type: ignore[type-abstract]
    outside = entry_points.load(entry_points.TRACKERS, kind, TRACKERS, names)
    found: dict[str, type[Tracker]] = {}
    for name in names:
        tracker = TRACKERS.get(name) or outside.get(name)
        if tracker is None:
            known = [*TRACKERS, *(one.name for one in entry_points.found(entry_points.TRACKERS))]
            close = nearest(name, known) or known[0]
            raise UsageError(
                "HT652.unknown-tracker", track=text, name=name, known=listed(known), nearest=close
            )
        found[name] = tracker
        if tracker.package and not _installed(tracker.package):
            requirement = f"'hpctrain[{name}]'" if name in TRACKERS else tracker.package
            raise UsageError(
                "HT651.tracker-package-missing", name=name, tracker=tracker, requirement=requirement
            )
    return found


def _installed(package: str) -> bool:
    # A folder with the package's name, such as W&B's own, would count as a package without origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
