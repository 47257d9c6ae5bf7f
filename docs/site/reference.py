"""Hook of mkdocs: pages of the reference, made from the parsers and the public names."""

import argparse
import ast
import dataclasses
import html
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP))

import hpctrain  # noqa: E402
from hpctrain.arguments import Options  # noqa: E402
from hpctrain.arguments.groups import GROUPS  # noqa: E402
from hpctrain.cli import COMMANDS  # noqa: E402
from hpctrain.jobs import JobSpec  # noqa: E402

# What scripts import, then what launchers, backends, precisions and trackers of other packages do.
PUBLIC = {
    "hpctrain": "What scripts and notebooks import.",
    "hpctrain.errors": "Errors. [errors.md](../../errors.md) lists their codes.",
    "hpctrain.data": "Samplers, loaders, unreadable samples. See [data.md](../../data.md).",
    "hpctrain.jobs": "Jobs of Slurm. See [notebooks.md](../../notebooks.md).",
    "hpctrain.compat.apex.amp": "See [migrate.md](../../migrate.md).",
    "hpctrain.compat.apex.optimizers": "See [migrate.md](../../migrate.md).",
    "hpctrain.compat.apex.parallel": "See [migrate.md](../../migrate.md).",
    "hpctrain.cluster.launchers.base": "To [add a launcher](../../architecture.md#add-a-launcher).",
    "hpctrain.backends.base": "To [add a backend](../../architecture.md#add-a-backend).",
    "hpctrain.precision.base": "To [add a precision](../../architecture.md#add-a-precision).",
    "hpctrain.monitoring.trackers": "To [add a tracker](../../watching.md#trackers).",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    pages = {"command-line": command_line(), "options": options(), "job": job()}
    pages |= {f"api/{module}": api(module, about) for module, about in PUBLIC.items()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def public_names(module: str) -> list[str]:
    """Return `__all__` of a module, whose source is not run."""
    path = TOP.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} has no __all__")


def api(module: str, about: str) -> str:
    """Return the page of a module, with an entry for each public name."""
    entries = [f"::: {module}.{name}" for name in public_names(module)]
    return "\n\n".join([f"# {module}", about, *entries])


def command_line() -> str:
    """Return the page of all commands."""
    parts = ["# Command line", "`hpctrain COMMAND --help` prints the same."]
    for name in COMMANDS:
        parser = argparse.ArgumentParser(prog=f"hpctrain {name}")
        importlib.import_module(f"hpctrain.cli.{name}").add(parser)
        parts += described(parser, "##")
    return "\n\n".join(parts)


def options() -> str:
    """Return the page of the training options."""
    parser = hpctrain.options()
    parts = [
        "# Options of a training script",
        "`hpctrain.options()` returns a parser with these options. Each is also a keyword of a "
        "Session, with `_` instead of `-`: `hpctrain.Session(run_dir=…)`.",
    ]
    actions = [action for action in parser._actions if action.dest != "help" and shown(action)]
    parts += [entry(parser, action) for action in actions]
    parts += ["## Keywords alone", "These options are not on the command line."]
    for field in dataclasses.fields(Options):
        if field.metadata["only_keyword"]:
            about = plain(field.metadata["help"])
            parts.append(f"`{field.name}`\n\n:   {about}. Default `{field.default!r}`.")
    for name, group in GROUPS.items():
        parts += [f"## Settings of `--{name}`", plain(group.help)]
        for field in group.fields.values():
            about = plain(field.metadata["help"])
            parts.append(f"`{field.name}`\n\n:   {about}. Default `{field.default!r}`.")
    return "\n\n".join(parts)


def job() -> str:
    """Return the page of a job's fields."""
    parts = [
        "# Fields of a job",
        "Fields of `hpctrain.JobSpec` and of a JOB.toml. `hpctrain submit` and `hpctrain render` "
        "have an option for each ([Command line](command-line.md#hpctrain-submit)). "
        "[Describe a job](../jobs.md#describe-a-job) groups them, and says which exclude each "
        "other.",
    ]
    for field in dataclasses.fields(JobSpec):
        kind = html.escape(str(field.type) if isinstance(field.type, str) else kind_of(field.type))
        has_default = field.default is not dataclasses.MISSING
        default = repr(field.default) if has_default else "{}"
        about = plain(field.metadata["help"].replace("%%", "%"))
        parts.append(f"`{field.name}`\n\n:   {about}. Type `{kind}`, default `{default}`.")
    return "\n\n".join(parts)


def kind_of(kind: type) -> str:
    """Return a type as its annotation is written."""
    return kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")


def described(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """Yield the parts of a parser and of its subparsers."""
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield f"{level} {parser.prog}"
    yield f"```text\n{usage}\n```"
    if parser.description:
        yield plain(parser.description)
    subparsers: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if shown(action)]
        for action in actions:
            if isinstance(action.choices, dict):
                subparsers |= action.choices
        entries = [
            entry(parser, action)
            for action in actions
            if action.dest != "help" and not isinstance(action.choices, dict)
        ]
        if entries:
            title = group.title or ""
            yield f"**{title[:1].upper()}{title[1:]}**"
            yield from entries
    if parser.epilog:
        yield plain(parser.epilog)
    for subparser in subparsers.values():
        yield from described(subparser, level + "#")


def shown(action: argparse.Action) -> bool:
    """Return whether `--help` shows an argument."""
    return action.help != argparse.SUPPRESS


def entry(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the entry of an argument, for a list of definitions."""
    formatter = parser._get_formatter()
    about = formatter._expand_help(action) if action.help else ""
    return f"`{formatter._format_action_invocation(action)}`\n\n:   {plain(about)}"


def plain(text: str) -> str:
    """Return a text in which Markdown finds nothing but code between backticks."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([\\*_\[\]#{}])", r"\\\1", html.escape(p, False)) for p in parts[::2]]
    return "".join(parts)
