"""Job options of submit and render: one for each field of JobSpec.

hpctrain submit --nodes 4 -- python train.py --lr 0.1
hpctrain submit JOB.toml --nodes 4 -- --lr 0.1        more arguments for the command of the file
"""

import argparse
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.values import EXTRA_OPTIONS

__all__ = ["EXAMPLE", "add_job_options", "no_command", "option", "spec_from"]

# Options with another name than their field: they are given once for each entry.
_REPEATED = {
    "environment": ("--env", "NAME=VALUE"),
    "extra": ("--extra", "NAME[=VALUE]"),
    "sweep": ("--sweep", "NAME=V1,V2"),
    "part": ("--part", "NAME=VALUE,…"),
    "modules": ("--module", "NAME"),
    "setup": ("--setup", "LINE"),
    "finish": ("--finish", "LINE"),
}
# sbatch's own names of options that mean the same.
_OF_SBATCH = {
    "name": ("-J", "--job-name"), "nodes": ("-N",), "tasks_per_node": ("--ntasks-per-node",),
    "cpus_per_task": ("-c",), "memory": ("--mem",), "time": ("-t",), "partition": ("-p",),
    "account": ("-A",), "qos": ("-q",), "constraint": ("-C",), "exclude": ("-x",),
    "dependency": ("-d",), "array": ("-a",),
}  # fmt: skip
# First field of each group of options.
_GROUPS = {
    "about": "what runs",
    "nodes": "where, how long, how often",
    "signal": "how it stops and continues",
    "environment": "its environment",
}
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
    for name in EXTRA_OPTIONS:
        pair = functools.partial("{}={}".format, name)
        parser.add_argument(
            f"--{name}", dest="extra", action="append", type=pair, default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


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
    names = (*_OF_SBATCH.get(field.name, ()), option(field.name))
    group.add_argument(*names, dest=field.name, default=argparse.SUPPRESS, **keywords)


def spec_from(arguments: argparse.Namespace) -> JobSpec:
    """Return the job of a command line and its JOB.toml, without the defaults of the shell.

    With launcher "none" the job may lack a command, which then follows the script's name on the
    command line of sbatch.

    Args:
        arguments: parsed command line.

    Raises:
        UsageError: the command line describes no job, or an impossible one.
    """
    options = {
        field.name: _read(field.name, getattr(arguments, field.name))
        for field in dataclasses.fields(JobSpec)
        if hasattr(arguments, field.name) and field.name != "command"
    }
    if arguments.job is not None:
        options = _over_file(arguments.job, options, arguments.job_command or ())
    elif arguments.job_command:
        options["command"] = arguments.job_command
    spec = JobSpec(**options)
    if not spec.command and spec.launcher != "none":
        raise no_command()
    return spec


def no_command() -> UsageError:
    """Return the error for a job without a command."""
    return UsageError("HT803.no-command")


def _over_file(path: str, options: dict[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Return the values of a JOB.toml, with options over them, and arguments after its command."""
    if not path.endswith(".toml"):
        raise UsageError("HT803.not-toml", path=path)
    from hpctrain.jobs import job_files  # imports the TOML parser, which few commands need

    values = job_files.read(Path(path))
    if command:
        first = JobSpec(command=values.get("command", ())).command
        options = {**options, "command": (*first, *command)}
    return job_files.merged(values, options)


def _read(name: str, value: Any) -> Any:
    """Combine the values of a repeated option; return other values unchanged."""
    if name == "environment":
        return dict(_pair(name, entry) for entry in value)
    if name == "extra":
        return {entry.partition("=")[0]: entry.partition("=")[2] if "=" in entry else True
                for entry in value}  # fmt: skip
    if name == "sweep":
        return _grid(value)
    if name == "part":
        return [_part(entry) for entry in value]
    return value


def _grid(value: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each axis of a grid."""
    return {axis: values.split(",") for axis, values in (_pair("sweep", entry) for entry in value)}


def _part(text: str) -> dict[str, str]:
    """Return the values of one more part, with the names of JobSpec."""
    pairs = (_pair("part", entry) for entry in re.split(r",(?=[a-z_-]+=)", text))
    return {name.replace("-", "_"): value for name, value in pairs}


def _pair(name: str, text: str) -> tuple[str, str]:
    head, equals, tail = text.partition("=")
    if not equals:
        flag, metavar = _REPEATED[name]
        raise UsageError("HT801.option-without-value", flag=flag, entry=text, metavar=metavar)
    return head, tail
