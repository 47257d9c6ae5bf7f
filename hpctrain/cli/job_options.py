"""The options that describe a job: one for each field of JobSpec, for submit and render.

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

# Spelt differently from their fields: options that are given once for each entry.
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
# sbatch's short options, by the field that is meant.
_SHORT = {
    "N": "nodes", "n": "tasks_per_node", "t": "time", "p": "partition", "A": "account",
    "c": "cpus_per_task", "J": "name", "G": "gpus_per_node", "q": "qos", "C": "constraint",
    "d": "dependency", "a": "array", "x": "exclude",
}  # fmt: skip
_EXAMPLE = "hpctrain submit --nodes 2 --gpus-per-node 4 -- python train.py"


def option(name: str) -> str:
    """The option of a field of JobSpec; for the command, where it stands."""
    if name == "command":
        return "-- COMMAND"
    return _REPEATED[name][0] if name in _REPEATED else "--" + name.replace("_", "-")


class _JobAndCommand(argparse.Action):
    """[JOB.toml] [options] [-- COMMAND …]: options may stand on both sides of the file.

    argparse gives up on options that follow a positional argument where the rest is a command, so
    the rest comes here whole, and its options go back to the parser.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Sort out the rest of the command line."""
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
    """An option by sbatch's name: says what it is called here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Refuse it."""
        del parser, namespace, values
        raise UsageError(
            f"{option_string} is an option of sbatch's", "", f"{self.const} in its place"
        )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of JobSpec, and [JOB.toml] … [-- COMMAND …].

    Only what was given is kept in the namespace: read it by `spec_from`.
    """
    parser.set_defaults(job=None, words=None)
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        action=_JobAndCommand,
        metavar="[JOB.toml] [-- COMMAND ...]",
        help="a job in a file, and a command and its arguments, which no shell reads; after a "
        "JOB.toml that has a command they are more arguments for it",
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
    """What stands in place of an option of sbatch's, with options for the names of fields."""
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
    """The job that a command line describes, with its JOB.toml, profile and site.sh.

    Without a launcher it may have no command: that follows the script's name on sbatch's line.

    Raises:
        UsageError: it describes none, or one that cannot be.
    """
    return _described(arguments, os.environ).spec


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """What a command line describes.

    Attributes:
        spec: the job, with profile and site.sh.
        sources: where each of its values was said, by name.
        said: the values of options and JOB.toml alone.
    """

    spec: JobSpec
    sources: Mapping[str, str]
    said: Mapping[str, Any]

    @property
    def own(self) -> JobSpec:
        """The job without profile and site.sh, for a JOB.toml."""
        return JobSpec(**self.said)


def gather(arguments: argparse.Namespace, env: Mapping[str, str]) -> Described:
    """The job as `spec_from` has it, with a command, and where its values were said.

    Raises:
        UsageError: as `spec_from`; or it has no command.
    """
    described = _described(arguments, env)
    if not described.spec.argv:
        raise _no_command()
    return described


def _no_command() -> UsageError:
    return UsageError("no command to run", "a JOB.toml that has one, or -- COMMAND", _EXAMPLE)


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
    """The checked values of a JOB.toml."""
    if not path.endswith(".toml"):
        raise UsageError(f"{path} is no .toml", "a JOB.toml, or -- before the command", _EXAMPLE)
    from hpctrain.jobs import job_files  # with the parser of TOML, only where there is some

    return site.checked(job_files.read(Path(path)), path)


def _read(name: str, value: Any) -> Any:
    """What the repeated options say together."""
    if name == "environment":
        return dict(_pair(name, one) for one in value)
    if name == "extra":
        return {one.partition("=")[0]: one.partition("=")[2] if "=" in one else True
                for one in value}  # fmt: skip
    if name == "sweep":
        return _grid(value)
    return value


def _grid(value: Sequence[str]) -> dict[str, list[str]]:
    """The values of each axis of a grid."""
    return {axis: values.split(",") for axis, values in (_pair("sweep", one) for one in value)}


def _pair(name: str, text: str) -> tuple[str, str]:
    head, equals, tail = text.partition("=")
    if not equals:
        flag, metavar = _REPEATED[name]
        raise UsageError(f"{flag} {text[:200]!r}", f"{flag} {metavar}")
    return head, tail
