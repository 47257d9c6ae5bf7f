"""Schedulers that `hpctrain render` writes batch scripts for: one file and one name for each."""

from importlib import import_module

from hpctrain.jobs.schedulers.base import LOG, LOG_OF_ARRAY, Scheduler

__all__ = ["LOG", "LOG_OF_ARRAY", "SCHEDULERS", "of"]

# Modules of this package, each with a SCHEDULER. They are imported when they are used.
SCHEDULERS = ("slurm", "pbs", "flux")


def of(name: str) -> Scheduler:
    """Return a scheduler by its name in `SCHEDULERS`."""
    module = import_module(f"{__name__}.{name}")
    scheduler: Scheduler = module.SCHEDULER
    return scheduler
