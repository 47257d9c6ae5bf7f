"""`hpctrain completion`: print the script with which a shell completes this command line."""

import argparse
import sys

from hpctrain import cli
from hpctrain.errors import UsageError

__all__ = ["add"]

_SHELLS = ("bash", "zsh", "fish")
# Values that are files or folders, by their names in the help.
_FILES = ("FILE", "FILE.html", "FILE.tar", "IMAGE", "PATH", "RUN", "SCRIPT", "SOURCE", "TARGET")
_FOLDERS = ("DIR",)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Prints a script for a shell, which then completes commands, options, their choices and "
        "files of hpctrain. The script is that of this version: write it again after an update. "
        "It needs shtab: pip install 'hpctrain[completion]'"
    )
    parser.epilog = (
        "bash: hpctrain completion bash >~/.local/share/bash-completion/completions/hpctrain, or "
        'eval "$(hpctrain completion bash)" in ~/.bashrc. '
        "zsh: hpctrain completion zsh >_hpctrain, in a folder of $fpath. "
        "fish: hpctrain completion fish >~/.config/fish/completions/hpctrain.fish. "
        "The folders have to exist."
    )
    parser.add_argument("shell", choices=_SHELLS, help="shell that completes")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "HT651",
            f"shtab cannot be imported: {error}",
            "shtab, which writes the script",
            "pip install 'hpctrain[completion]'",
        ) from None
    parser = cli.parser_of(cli.COMMANDS)
    _mark_files(parser, {**dict.fromkeys(_FILES, shtab.FILE), **dict.fromkeys(_FOLDERS, shtab.DIR)})
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0


def _mark_files(parser: argparse.ArgumentParser, kinds: dict[str, object]) -> None:
    """Tell shtab which values of a parser and its commands are files and folders."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                _mark_files(command, kinds)
        elif action.nargs == argparse.REMAINDER:
            # shtab leaves out what the help does not show, such as the script of `hpctrain run`.
            action.help = "script, job file or command, with its arguments"
            action.complete = kinds["FILE"]  # type: ignore[attr-defined]
        elif action.metavar in kinds:
            action.complete = kinds[str(action.metavar)]  # type: ignore[attr-defined]
