"""hpctrain: one PyTorch training script, unchanged, under every launcher of an HPC cluster.

Each public name is imported at its first use, so `import hpctrain` is fast and needs no torch.
(This file and `__main__` run on any Python 3, so that an old one reports which Python is needed.)
"""

import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("hpctrain runs on Linux and macOS; on Windows, install it inside of WSL2")

from hpctrain._lazy import lazy
from hpctrain._version import __version__

if TYPE_CHECKING:
    from hpctrain.arguments import options
    from hpctrain.cluster.job import Allocation
    from hpctrain.cluster.launchers import detect
    from hpctrain.cluster.world import World
    from hpctrain.errors import HpctrainError
    from hpctrain.jobs import JobSpec, submit
    from hpctrain.launch import spawn
    from hpctrain.training.session import Session
    from hpctrain.training.training_run import Run

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

if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = lazy(
        __name__,
        {
            "arguments": ("options",),
            "cluster.job": ("Allocation",),
            "cluster.launchers": ("detect",),
            "cluster.world": ("World",),
            "errors": ("HpctrainError",),
            "jobs": ("JobSpec", "submit"),
            "launch": ("spawn",),
            "training.training_run": ("Run",),
            "training.session": ("Session",),
        },
    )


def __dir__():  # type: ignore[no-untyped-def]
    return sorted(__all__)
