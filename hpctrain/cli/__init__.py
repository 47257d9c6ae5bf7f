"""Command line: one module for each command, and the table of the commands."""

import argparse
import importlib
import io
import re
import sys
from collections.abc import Container, Iterator, Sequence
from typing import NoReturn

from hpctrain._version import __version__
from hpctrain.errors import HpctrainError

__all__ = ["COMMANDS", "main", "parser_of"]

# Each is a module of this package with `add(parser)`, which adds the arguments of the command, and
# sets the default `command` to a function that takes the parsed arguments and returns an exit code.
COMMANDS = {
    "init": "write a first training script, and its batch script for this cluster",
    "run": "start the ranks of a program, here or on all hosts of a job",
    "submit": "submit a job to Slurm",
    "status": "show your jobs, why they wait, and the progress of their runs",
    "top": "show your jobs and runs on a live screen, with bars and ETA",
    "logs": "show the log of a job, or follow it to the end of the job",
    "cancel": "cancel jobs; their checkpoints are kept",
    "requeue": "start jobs again from their last checkpoints",
    "render": "write the batch script of a job",
    "lint": "find errors in an sbatch script",
    "explain": "show the rank of this process and its variables, or explain an error",
    "doctor": "check this machine, or under a launcher all ranks and a sum over them",
    "bench": "measure this machine, or all ranks under a launcher: steps and all-reduce",
    "report": "show the results of runs on one HTML page",
    "hostlist": "expand a Slurm host list",
    "checkpoint": "show the checkpoints of a run, and what is damaged",
    "export": "write the weights of a checkpoint as safetensors",
    "horovod": "build and install a Horovod that fits the installed torch",
    "completion": "print the script with which bash, zsh or fish completes this command line",
}

_NO_COMMAND = re.compile("argument COMMAND: invalid choice: '([^']*)'")

# What `hpctrain` alone prints.
_FIRST = """\
usage: hpctrain COMMAND …; the first ones to know:

  hpctrain doctor                                         check this machine
  hpctrain run --nproc-per-node 2 train.py                start two ranks here
  hpctrain submit --nodes 2 --time 1h -- python train.py  submit a job to Slurm
  hpctrain status                                         your jobs and runs
  hpctrain lint job.sh                                    find errors in a batch script

hpctrain --help lists all commands, hpctrain COMMAND --help their options.
"""


class _Parser(argparse.ArgumentParser):
    """Parser that suggests an option similar to an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        from hpctrain.cluster.texts import nearest, option_meant  # seldom needed

        if wrong := _NO_COMMAND.match(message):
            meant = nearest(wrong[1], COMMANDS)
            super().error(
                f"no command {wrong[1]!r}"
                + (f"; did you mean {meant}?" if meant else "; hpctrain --help lists all commands")
            )
        options = [
            option
            for action in self.all_actions()
            for option in action.option_strings
            if action.help != argparse.SUPPRESS
        ]
        meant = option_meant(message, options)
        super().error(f"{message}; did you mean {meant}?" if meant else message)

    def command_of(self, words: Sequence[str]) -> "_Parser":
        """Return the parser of the command that a command line names, such as of `bench step`."""
        parser = self
        for word in words:
            for action in parser._actions:
                if isinstance(action.choices, dict) and word in action.choices:
                    parser = action.choices[word]
                    break
        return parser

    def all_actions(self) -> Iterator[argparse.Action]:
        """Yield the arguments of this parser and of its commands."""
        for action in self._actions:
            yield action
            for command in action.choices.values() if isinstance(action.choices, dict) else ():
                yield from command.all_actions()


def parser_of(names: Container[str]) -> _Parser:
    """Return the parser of the command line.

    Args:
        names: commands that it has, with their arguments. Without a command among them, it has the
            name and the help of each.
    """
    parser = _Parser(
        prog="hpctrain",
        description="One PyTorch training script, unchanged, under every launcher.",
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    found = [name for name in COMMANDS if name in names]
    for name in found or COMMANDS:
        command = subparsers.add_parser(name, help=COMMANDS[name])
        if found:
            importlib.import_module(f"hpctrain.cli.{name}").add(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: arguments without the program's name (default: those of this process).
    """
    # A name that is not UTF-8 should not make a command fail after its work is done.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        sys.stderr.write(_FIRST)
        return 2
    try:
        # To import all, or to make all parsers, takes longer than most commands.
        parser = parser_of(given[:1])
        parsed, unknown = parser.parse_known_args(given)
        if unknown:
            parser.command_of(given).error(f"unrecognized arguments: {' '.join(unknown)}")
        code = int(parsed.command(parsed))
        sys.stdout.flush()
        return code
    except HpctrainError as error:
        sys.stderr.write(f"hpctrain: error: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe closed it, as in `hpctrain hostlist … | head -1`.
        from hpctrain.process.logging import abandon  # which imports logging, as few commands need

        abandon(sys.stdout)
        return 0
