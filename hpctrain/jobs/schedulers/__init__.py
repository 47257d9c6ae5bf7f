"""Schedulers that `hpctrain render` writes batch scripts for: one file and one line for each."""

from collections.abc import Mapping

from hpctrain.jobs.schedulers.base import LOG, LOG_OF_ARRAY, Scheduler
from hpctrain.jobs.schedulers.flux import FLUX
from hpctrain.jobs.schedulers.lsf import LSF
from hpctrain.jobs.schedulers.pbs import PBS
from hpctrain.jobs.schedulers.slurm import SLURM

__all__ = ["LOG", "LOG_OF_ARRAY", "SCHEDULERS"]

SCHEDULERS: Mapping[str, Scheduler] = {"slurm": SLURM, "pbs": PBS, "lsf": LSF, "flux": FLUX}
