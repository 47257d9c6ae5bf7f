"""Account, partition and qos of all jobs on a cluster, from the variables that sbatch reads.

option > JOB.toml > SBATCH_* of the shell > Slurm's own
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpctrain.jobs.spec import JobSpec

__all__ = ["VARIABLES", "completed", "defaults"]

#: Variables that sbatch reads, by the names of JobSpec.
VARIABLES = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}


def defaults(spec: JobSpec, env: Mapping[str, str]) -> dict[str, Any]:
    """Return a value for each of account, partition and qos that a job leaves open."""
    return {
        name: env[variable]
        for name, variable in VARIABLES.items()
        if not getattr(spec, name) and env.get(variable)
    }


def completed(spec: JobSpec, env: Mapping[str, str]) -> JobSpec:
    """Return a job with the defaults of the shell.

    Raises:
        UsageError: one of them has an invalid value.
    """
    return replace(spec, **defaults(spec, env))
