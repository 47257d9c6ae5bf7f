"""Account, partition and qos of all jobs on a cluster: from the shell, or from site.sh.

    option > JOB.toml > SBATCH_* of the shell > site.sh > Slurm's own

site.sh is the user's file of bash that rendered scripts source inside of the job. Submission starts
no shell for it: only its plain assignments of these variables count here.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs.spec import JobSpec

__all__ = ["completed", "defaults"]

# Variables that sbatch reads, by the names of JobSpec.
_VARIABLES = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}

_ASSIGNMENT = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?P<name>SBATCH_[A-Z]+)="
    r"(?:'(?P<single>[^'\n]*)'|\"(?P<double>[^\"\\$`\n]*)\"|(?P<plain>[\w@%+=:,./-]*))"
    r"[ \t]*(?:[ \t]#.*)?\r?\Z",
    re.ASCII,
)


def defaults(spec: JobSpec, env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return a value and its source for each of account, partition and qos that a job leaves open.

    Raises:
        UsageError: site.sh cannot be read.
    """
    home = env.get("HOME") or os.path.expanduser("~")
    path = Path(env.get("HPCTRAIN_SITE") or Path(home, ".config", "hpctrain", "site.sh"))
    assigned = _assignments(path)
    found: dict[str, tuple[str, str]] = {}
    for name, variable in _VARIABLES.items():
        for values, source in ((env, f"${variable}"), (assigned, str(path))):
            if not getattr(spec, name) and values.get(variable):
                found.setdefault(name, (values[variable], source))
    return found


def completed(spec: JobSpec, env: Mapping[str, str]) -> JobSpec:
    """Return a job with the defaults of the shell and of site.sh.

    Raises:
        UsageError: site.sh cannot be read, or has an invalid value.
    """
    values: dict[str, Any] = {name: value for name, (value, _) in defaults(spec, env).items()}
    return replace(spec, **values)


def _assignments(path: Path) -> dict[str, str]:
    """Return the plain assignments of a file; the last one of a name counts, as in bash."""
    try:
        content = path.read_bytes().decode()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            "HT802", f"{path} cannot be read: {error}", "a text file of your own"
        ) from None
    matches = [match for match in map(_ASSIGNMENT.match, content.splitlines()) if match]
    return {
        match["name"]: match["single"] or match["double"] or match["plain"] or ""
        for match in matches
    }
