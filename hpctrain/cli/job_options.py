"""Job options of submit and render: one for each field of JobSpec.

hpctrain submit --nodes 4 -- python train.py --lr 0.1
hpctrain submit JOB.toml --nodes 4 -- --lr 0.1        more arguments for the command of the file
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs import site, values
from hpctrain.jobs.spec import JobSpec, names

__all__ = ["EXAMPLE", "Described", "add_job_options", "gather", "option", "spec_from"]

# Options with another name than their field: they are given once for each entry.
_REPEATED = {
    "environment": ("--env", "NAME=VALUE"),
    "extra": ("--extra", "NAME[=VALUE]"),
    "sweep": ("--sweep", "NAME=V1,V2"),
    "modules": ("--module", "NAME"),
    "setup": ("--setup", "LINE"),
    "finish": ("--finish", "LINE"),
}
# First field of each group of options.
_GROUPS = {
    "about": "what runs",
    "nodes": "where, how long, how often",
    "signal": "how it stops and continues",
    "environment": "its environment",
}
# sbatch's short options, with the field of each.
_SHORT = {
    "N": "nodes", "n": "tasks_per_node", "t": "time", "p": "partition", "A": "account",
    "c": "cpus_per_task", "J": "name", "G": "gpus_per_node", "q": "qos", "C": "constraint",
    "d": "dependency", "a": "array", "x": "exclude",
}  # fmt: skip
EXAMPLE = "hpctrain submit --nodes 2 --gpus-per-node 4 -- python train.py"


def option(name: str) -> str:
    """Return the option of a field of JobSpec; for the command, its place on the line."""
    if name == "command":
        return "-- COMMAND"
    return _REPEATED[name][0] if name in _REPEATED else "--" + name.replace("_", "-")


class _JobAndCommand(argparse.Action):
    """Action for [JOB.toml] [options] [-- COMMAND …], with options on both sides of the file.

    argparse does not parse options after a positional argument if the rest is a command. So this
    action gets the whole rest, and passes the options in it back to the parser.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Split the rest of the command line into JOB.toml, options and command."""
        del option_string
        arguments = list(values)
        if "--" in arguments:
            cut = arguments.index("--")
            arguments, namespace.job_command = arguments[:cut], arguments[cut + 1 :]
        if arguments:
            if namespace.job is not None:
                parser.error(
                    f"{namespace.job} and {arguments[0]}: one JOB.toml; a command follows --"
                )
            namespace.job = arguments[0]
            parser.parse_args(arguments[1:], namespace)


class _SbatchOption(argparse.Action):
    """Action that refuses an option of sbatch and names hpctrain's option for it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Raise the error."""
        del parser, namespace, values
        raise UsageError(
            "HT804", f"{option_string} is an option of sbatch's", "", f"{self.const} in its place"
        )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of JobSpec, and [JOB.toml] … [-- COMMAND …].

    The namespace has only the options that were given; `spec_from` reads it.
    """
    parser.set_defaults(job=None, job_command=None)
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        action=_JobAndCommand,
        metavar="[JOB.toml] [-- COMMAND ...]",
        help="job file, and the command with its arguments, which no shell interprets; if "
        "JOB.toml has a command, they are more arguments for it",
    )
    group: Any = parser
    for field in dataclasses.fields(JobSpec):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        if field.name != "command":
            _add(group, field)
    own_options = {option(field.name) for field in dataclasses.fields(JobSpec)} | {
        "--wait",
        "--requeue",
    }
    for name, replacement in (
        *((f"-{letter}", option(name)) for letter, name in _SHORT.items()),
        *((f"--{name}", _replacement(text)) for name, text in values.OWN_OPTIONS.items()),
    ):
        if name not in own_options and name != "--no-requeue":
            parser.add_argument(
                name, action=_SbatchOption, nargs="?", const=replacement, help=argparse.SUPPRESS
            )


def _replacement(text: str) -> str:
    """Return the replacement for an option of sbatch, with options in place of field names."""
    return " ".join(option(name) if name in names() else name for name in text.split())


def _add(group: Any, field: dataclasses.Field[Any]) -> None:
    keywords: dict[str, Any] = {
        "help": field.metadata["help"],
        "metavar": field.metadata["metavar"] or "TEXT",
    }
    if isinstance(field.default, bool):
        keywords = {"help": field.metadata["help"], "action": argparse.BooleanOptionalAction}
    elif field.name in _REPEATED:
        keywords |= {"metavar": _REPEATED[field.name][1], "action": "append"}
        keywords["help"] += " (repeatable)"
    group.add_argument(option(field.name), dest=field.name, default=argparse.SUPPRESS, **keywords)


def spec_from(arguments: argparse.Namespace) -> JobSpec:
    """Return the job of a command line, including its JOB.toml, profile and site.sh.

    With launcher "none" the job may lack a command, which then follows the script's name on the
    command line of sbatch.

    Raises:
        UsageError: the command line describes no job, or an impossible one.
    """
    return _described(arguments, os.environ).spec


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """Job of a command line, and the source of each value.

    Attributes:
        spec: job, including profile and site.sh.
        sources: source of each value, by the value's name.
        explicit: values of the options and of JOB.toml only.
    """

    spec: JobSpec
    sources: Mapping[str, str]
    explicit: Mapping[str, Any]

    @property
    def without_profile(self) -> JobSpec:
        """Job without profile and site.sh, for a JOB.toml."""
        return JobSpec(**self.explicit)


def gather(arguments: argparse.Namespace, env: Mapping[str, str]) -> Described:
    """Return the job as `spec_from` does, with a command, and the source of each value.

    Raises:
        UsageError: as in `spec_from`, or the job has no command.
    """
    described = _described(arguments, env)
    if not described.spec.argv:
        raise _no_command()
    return described


def _no_command() -> UsageError:
    return UsageError(
        "HT803", "no command to run", "a JOB.toml that has one, or -- COMMAND", EXAMPLE
    )


def _described(arguments: argparse.Namespace, env: Mapping[str, str]) -> Described:
    options = {
        field.name: _read(field.name, getattr(arguments, field.name))
        for field in dataclasses.fields(JobSpec)
        if hasattr(arguments, field.name) and field.name != "command"
    }
    file = {} if arguments.job is None else _job(arguments.job)
    command = arguments.job_command or []
    if command:
        if file.get("function") and "function" not in options:
            raise UsageError(
                "HT801",
                f"{' '.join(command)[:200]} after --, and {arguments.job} has a function",
                "a command in its place",
            )
        options["command"] = (*file.get("command", ()), *command)
    options = site.checked(options, "the command line")
    cluster = options.get("cluster", file.get("cluster", ""))
    lower_layers = site.layers(cluster, env)
    upper_layers = [site.Layer(str(arguments.job), file), site.Layer("the command line", options)]
    merged, sources = site.merged([*lower_layers, *upper_layers])
    spec = JobSpec(**merged)
    if not spec.argv and spec.launcher != "none":
        raise _no_command()
    return Described(spec, sources, site.merged(upper_layers)[0])


def _job(path: str) -> dict[str, Any]:
    """Return the checked values of a JOB.toml."""
    if not path.endswith(".toml"):
        raise UsageError(
            "HT803", f"{path} is no .toml", "a JOB.toml, or -- before the command", EXAMPLE
        )
    from hpctrain.jobs import job_files  # imports the TOML parser, which few commands need

    return site.checked(job_files.read(Path(path)), path)


def _read(name: str, value: Any) -> Any:
    """Combine the values of a repeated option; return other values unchanged."""
    if name == "environment":
        return dict(_pair(name, entry) for entry in value)
    if name == "extra":
        return {entry.partition("=")[0]: entry.partition("=")[2] if "=" in entry else True
                for entry in value}  # fmt: skip
    if name == "sweep":
        return _grid(value)
    return value


def _grid(value: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each axis of a grid."""
    return {axis: values.split(",") for axis, values in (_pair("sweep", entry) for entry in value)}


def _pair(name: str, text: str) -> tuple[str, str]:
    head, equals, tail = text.partition("=")
    if not equals:
        flag, metavar = _REPEATED[name]
        raise UsageError("HT801", f"{flag} {text[:200]!r}", f"{flag} {metavar}")
    return head, tail
