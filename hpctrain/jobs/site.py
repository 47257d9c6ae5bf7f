"""Settings for all jobs of a cluster: profiles in config.toml, and site.sh.

    option > JOB.toml > profile [cluster.NAME] > SBATCH_* of the shell > site.sh > Slurm's own

site.sh is the user's file of bash that rendered scripts source inside of the job. Submission starts
no shell for it: only its plain assignments of SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_QOS count
here, as defaults.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs.spec import JobSpec, complaint, unknown

__all__ = ["DEFAULTS", "Layer", "checked", "completed", "config_file", "layers", "merged", "script"]

# Variables that sbatch reads, by the names of JobSpec.
DEFAULTS = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}

_ASSIGNMENT = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?P<name>SBATCH_[A-Z]+)="
    r"(?:'(?P<single>[^'\n]*)'|\"(?P<double>[^\"\\$`\n]*)\"|(?P<plain>[\w@%+=:,./-]*))"
    r"[ \t]*(?:[ \t]#.*)?\r?\Z",
    re.ASCII,
)
_MOST_BYTES = 2**20
# Fields of a row exclude each other: the last layer that sets one of them counts.
_INSTEAD_OF = (("command", "function"), ("array", "sweep"), ("venv", "conda", "stage_environment"))


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of a job from one source.

    Attributes:
        source: origin of the values, for messages.
        values: values by the names of JobSpec.
    """

    source: str
    values: Mapping[str, Any]


def script(env: Mapping[str, str]) -> Path:
    """Return the path of the user's site.sh, which may not exist."""
    return _settings(env, "HPCTRAIN_SITE", "site.sh")


def config_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's config.toml with the profiles, which may not exist."""
    return _settings(env, "HPCTRAIN_CONFIG", "config.toml")


def layers(cluster: str, env: Mapping[str, str]) -> list[Layer]:
    """Return the layers below the options and JOB.toml, the lowest first.

    Args:
        cluster: name of the profile; empty for none.
        env: environment with SBATCH_* of the shell, and with the paths of the files.

    Raises:
        UsageError: the profile is missing or invalid, or a file cannot be read.
    """
    found = [_site(script(env))]
    shell = {name: env[variable] for name, variable in DEFAULTS.items() if env.get(variable)}
    if shell:
        found.append(Layer("the shell's SBATCH_*", checked(shell, "SBATCH_* of the shell")))
    if cluster:
        found.append(_profile(config_file(env), cluster))
    return [layer for layer in found if layer.values]


def merged(found: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that hold, and the source of each, by the same names.

    Later layers overrule earlier ones; tables are joined. A virtual environment of a later layer
    replaces a conda environment of an earlier one, and so on.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in found:
        for row in _INSTEAD_OF:
            if any(layer.values.get(name) for name in row):
                for name in row:
                    values.pop(name, None)
                    sources.pop(name, None)
        for name, value in layer.values.items():
            below = values.get(name)
            joined = name != "sweep" and isinstance(value, Mapping) and isinstance(below, Mapping)
            values[name] = {**below, **value} if joined and below else value
            sources[name] = f"{sources[name]}, {layer.source}" if joined else layer.source
    return values, sources


def completed(spec: JobSpec, env: Mapping[str, str]) -> JobSpec:
    """Return a job made in Python with the defaults of its profile, of the shell and of site.sh.

    Raises:
        UsageError: as in `layers`, or the combined values are invalid.
    """
    explicit = {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if getattr(spec, field.name) not in (field.default, {})
    }
    values, _ = merged([*layers(spec.cluster, env), Layer("the job", explicit)])
    return JobSpec(**values)


def checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values as JobSpec keeps them, each checked by itself.

    Raises:
        UsageError: unknown names or invalid values; the message has a line for each.
    """
    problems = unknown(list(values))
    checked_values = {}
    for field in fields(JobSpec):
        if field.name in values:
            try:
                checked_values[field.name] = field.metadata["check"](values[field.name])
            except (ValueError, TypeError) as error:
                problems.append((f"{field.name} = {repr(values[field.name])[:100]}", str(error)))
    if problems:
        raise complaint(problems, source)
    return checked_values


def _settings(env: Mapping[str, str], variable: str, name: str) -> Path:
    if env.get(variable):
        return Path(env[variable])
    return Path(env.get("HOME") or os.path.expanduser("~"), ".config", "hpctrain", name)


def _site(path: Path) -> Layer:
    """Return the plain assignments of site.sh; the last one of a name counts, as in bash."""
    variables = {}
    for line in _text(path).splitlines():
        if match := _ASSIGNMENT.match(line):
            quoted = match["single"] if match["single"] is not None else match["double"]
            variables[match["name"]] = match["plain"] if quoted is None else quoted
    values = {
        name: variables[variable] for name, variable in DEFAULTS.items() if variables.get(variable)
    }
    return Layer(str(path), checked(values, str(path)))


def _profile(path: Path, name: str) -> Layer:
    import tomllib  # only for a profile: it is a third of the imports of a submission

    try:
        content = tomllib.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "HT802", f"{path} is no TOML: {error}", "[cluster.NAME] and values"
        ) from None
    profiles = content.get("cluster", {})
    if not isinstance(profiles, dict) or not isinstance(profiles.get(name), dict):
        names = ", ".join(map(str, profiles)) if isinstance(profiles, dict) else ""
        raise UsageError(
            "HT802",
            f"cluster = {name!r}: {path} has no [cluster.{name}]",
            f"one of {names}" if names else "a table of that name, with the names of JOB.toml",
        )
    source = f"[cluster.{name}] of {path}"
    return Layer(source, checked(profiles[name], source))


def _text(path: Path) -> str:
    """Return the text of a file; empty if there is no file.

    Raises:
        UsageError: the file exists and cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return content.decode()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UsageError(
            "HT802", f"{path} cannot be read: {error}", "a text file of your own"
        ) from None
