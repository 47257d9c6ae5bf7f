"""hpctrain: one PyTorch training script, unchanged, under every launcher of an HPC cluster.

Each public name is imported at its first use, so `import hpctrain` is fast and needs no torch.
(This file and `__main__` run on any Python 3, so that an old one reports which Python is needed.)
"""

from typing import TYPE_CHECKING

from hpctrain._version import __version__

if TYPE_CHECKING:
    from hpctrain.arguments import options
    from hpctrain.cluster.job import Allocation
    from hpctrain.cluster.launchers import detect
    from hpctrain.cluster.world import World
    from hpctrain.errors import HpctrainError
    from hpctrain.jobs import JobSpec, submit
    from hpctrain.launch import spawn
    from hpctrain.training.run import Run
    from hpctrain.training.session import Session

__all__ = [
    "Allocation",
    "HpctrainError",
    "JobSpec",
    "Run",
    "Session",
    "World",
    "__version__",
    "detect",
    "options",
    "spawn",
    "submit",
]

_HOME = {
    "Allocation": "cluster.job",
    "HpctrainError": "errors",
    "JobSpec": "jobs",
    "Run": "training.run",
    "Session": "training.session",
    "World": "cluster.world",
    "detect": "cluster.launchers",
    "options": "arguments",
    "spawn": "launch",
    "submit": "jobs",
}


def __getattr__(name):  # type: ignore[no-untyped-def]
    from importlib import import_module

    if name == "jobs":  # for a notebook that looks up a job: hpctrain.jobs.find(ID)
        return import_module("hpctrain.jobs")
    if name not in _HOME:
        raise AttributeError("module 'hpctrain' has no attribute {!r}".format(name))
    value = getattr(import_module("hpctrain." + _HOME[name]), name)
    # Stored here, so that `__getattr__` is called only once for each name.
    globals()[name] = value
    return value


def __dir__():  # type: ignore[no-untyped-def]
    return sorted(__all__)
