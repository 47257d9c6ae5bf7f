"""Trackers, which receive rows of metrics besides metrics.jsonl; each has its own module.

To add one, write a module with a subclass of `Tracker`, and add a line to `TRACKERS`. A package
outside of hpctrain adds one by an entry point of the group `hpctrain.trackers`.
"""

import importlib.util
from typing import TYPE_CHECKING

from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError
from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.monitoring.trackers.mlflow import MLflow
from hpctrain.monitoring.trackers.tensorboard import TensorBoard
from hpctrain.monitoring.trackers.tracking import Tracking
from hpctrain.monitoring.trackers.wandb import WandB

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["TRACKERS", "About", "Tracker", "Tracking", "find"]

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
_GROUP = "hpctrain.trackers"


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
    # Here, as only runs with --track need it.
    from importlib.metadata import entry_points

    outside = list(entry_points(group=_GROUP))
    found: dict[str, type[Tracker]] = {}
    for name in map(str.strip, text.split(",")):
        added = [entry for entry in outside if entry.name == name]
        if len(added) + (name in TRACKERS) > 1:
            other = "hpctrain" if name in TRACKERS else _package(added[0])
            raise _unusable(added[-1], f"{other} has a tracker of that name")
        if not added and name not in TRACKERS:
            known = [*TRACKERS, *(entry.name for entry in outside)]
            raise UsageError(
                "HT652",
                f"--track {text}: no tracker is called {name!r}",
                f"one or several of {', '.join(known)}",
                f"--track {nearest(name, known) or known[0]}",
            )
        found[name] = _load(added[0]) if added else TRACKERS[name]
        package = found[name].package
        if package and not _installed(package):
            wanted = package if added else f"'hpctrain[{name}]'"
            raise UsageError(
                "HT651",
                f"--track {name}, but its package is not installed",
                f"a {package} that can be imported",
                f"pip install {wanted}",
            )
    return found


def _installed(package: str) -> bool:
    # A folder with the package's name, such as W&B's own, would count as a package without origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _load(entry: "EntryPoint") -> type[Tracker]:
    try:
        kind = entry.load()
    except Exception as error:  # whatever the package does at its import
        reason = (str(error).strip().splitlines() or [""])[0]
        raise _unusable(entry, f"its import fails: {type(error).__name__}: {reason}") from error
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise _unusable(entry, f"{kind!r} is no subclass of {Tracker.__module__}.Tracker")
    return kind


def _package(entry: "EntryPoint") -> str:
    return entry.dist.name if entry.dist else "a package"


def _unusable(entry: "EntryPoint", problem: str) -> UsageError:
    package = _package(entry)
    return UsageError(
        "HT662",
        f"{package} adds the tracker {entry.name} = {entry.value}: {problem}",
        "a subclass of Tracker, under a name of its own",
        f"pip install --upgrade {package}",
        f"pip uninstall {package}",
    )
