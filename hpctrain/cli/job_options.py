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

__all__ = ["Described", "add_job_options", "gather", "option", "spec_from"]

# Options with another name than their field: they are given once for each entry.
_REPEATED = {
    "environment": ("--env", "NAME=VALUE"),
    "extra": ("--extra", "NAME[=VALUE]"),
    "sweep": ("--sweep", "NAME=V1,V2"),
    "modules": ("--module", "NAME"),
    "setup": ("--setup", "LINE"),
}
_GROUPS = {
    "what runs": ("about", "elastic"),
    "where, how long, how often": ("nodes", "output"),
}
# sbatch's short options, with the field of each.
_SHORT = {
    "N": "nodes", "n": "tasks_per_node", "t": "time", "p": "partition", "A": "account",
    "c": "cpus_per_task", "J": "name", "G": "gpus_per_node", "q": "qos", "C": "constraint",
    "d": "dependency", "a": "array", "x": "exclude",
}  # fmt: skip
_EXAMPLE = "hpctrain submit --nodes 2 --gpus-per-node 4 -- python train.py"


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
        words = list(values)
        if "--" in words:
            cut = words.index("--")
            words, namespace.words = words[:cut], words[cut + 1 :]
        if words:
            if namespace.job is not None:
                parser.error(f"{namespace.job} and {words[0]}: one JOB.toml; a command follows --")
            namespace.job = words[0]
            parser.parse_args(words[1:], namespace)


class _OfSbatch(argparse.Action):
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
    parser.set_defaults(job=None, words=None)
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        action=_JobAndCommand,
        metavar="[JOB.toml] [-- COMMAND ...]",
        help="job file, and the command with its arguments, which no shell interprets; if "
        "JOB.toml has a command, they are more arguments for it",
    )
    group: Any = parser
    starts = {first: title for title, (first, _) in _GROUPS.items()}
    for one in dataclasses.fields(JobSpec):
        if one.name in starts:
            group = parser.add_argument_group(starts[one.name])
        if one.name != "command":
            _add(group, one)
    own = {option(one.name) for one in dataclasses.fields(JobSpec)} | {"--wait", "--requeue"}
    for name, meant in (
        *((f"-{letter}", option(name)) for letter, name in _SHORT.items()),
        *((f"--{name}", _spelt(text)) for name, text in values.OWN_OPTIONS.items()),
    ):
        if name not in own and name != "--no-requeue":
            parser.add_argument(
                name, action=_OfSbatch, nargs="?", const=meant, help=argparse.SUPPRESS
            )


def _spelt(text: str) -> str:
    """Return the replacement for an option of sbatch, with options in place of field names."""
    return " ".join(option(word) if word in names() else word for word in text.split())


def _add(group: Any, one: dataclasses.Field[Any]) -> None:
    more: dict[str, Any] = {
        "help": one.metadata["help"],
        "metavar": one.metadata["metavar"] or "TEXT",
    }
    if isinstance(one.default, bool):
        more = {"help": one.metadata["help"], "action": argparse.BooleanOptionalAction}
    elif one.name in _REPEATED:
        more |= {"metavar": _REPEATED[one.name][1], "action": "append"}
        more["help"] += " (repeatable)"
    group.add_argument(option(one.name), dest=one.name, default=argparse.SUPPRESS, **more)


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
        said: values of the options and of JOB.toml only.
    """

    spec: JobSpec
    sources: Mapping[str, str]
    said: Mapping[str, Any]

    @property
    def own(self) -> JobSpec:
        """Job without profile and site.sh, for a JOB.toml."""
        return JobSpec(**self.said)


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
        "HT803", "no command to run", "a JOB.toml that has one, or -- COMMAND", _EXAMPLE
    )


def _described(arguments: argparse.Namespace, env: Mapping[str, str]) -> Described:
    given = {
        one.name: _read(one.name, getattr(arguments, one.name))
        for one in dataclasses.fields(JobSpec)
        if hasattr(arguments, one.name) and one.name != "command"
    }
    file = {} if arguments.job is None else _job(arguments.job)
    words = arguments.words or []
    if words:
        if file.get("function") and "function" not in given:
            raise UsageError(
                "HT801",
                f"{' '.join(words)[:200]} after --, and {arguments.job} has a function",
                "a command in its place",
            )
        given["command"] = (*file.get("command", ()), *words)
    given = site.checked(given, "the command line")
    cluster = given.get("cluster", file.get("cluster", ""))
    below = site.layers(cluster, env)
    above = [site.Layer(str(arguments.job), file), site.Layer("the command line", given)]
    merged, sources = site.merged([*below, *above])
    spec = JobSpec(**merged)
    if not spec.argv and spec.launcher != "none":
        raise _no_command()
    return Described(spec, sources, site.merged(above)[0])


def _job(path: str) -> dict[str, Any]:
    """Return the checked values of a JOB.toml."""
    if not path.endswith(".toml"):
        raise UsageError(
            "HT803", f"{path} is no .toml", "a JOB.toml, or -- before the command", _EXAMPLE
        )
    from hpctrain.jobs import job_files  # imports the TOML parser, which few commands need

    return site.checked(job_files.read(Path(path)), path)


def _read(name: str, value: Any) -> Any:
    """Combine the values of a repeated option; return other values unchanged."""
    if name == "environment":
        return dict(_pair(name, one) for one in value)
    if name == "extra":
        return {one.partition("=")[0]: one.partition("=")[2] if "=" in one else True
                for one in value}  # fmt: skip
    if name == "sweep":
        return _grid(value)
    return value


def _grid(value: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each axis of a grid."""
    return {axis: values.split(",") for axis, values in (_pair("sweep", one) for one in value)}


def _pair(name: str, text: str) -> tuple[str, str]:
    head, equals, tail = text.partition("=")
    if not equals:
        flag, metavar = _REPEATED[name]
        raise UsageError("HT801", f"{flag} {text[:200]!r}", f"{flag} {metavar}")
    return head, tail
