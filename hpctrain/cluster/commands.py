"""Run of a command with a time limit."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["LateAnswerError", "NoAnswerError", "git", "run"]

_GIT_SECONDS = 5.0


class NoAnswerError(Exception):
    """A command that is missing, failed, or took too long; the text has the reason."""


class LateAnswerError(NoAnswerError):
    """A command that took too long and was killed."""


def run(
    command: Sequence[str],
    seconds: float,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    text: bytes = b"",
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, and return its exit code, standard output and standard error.

    Args:
        command: program and its arguments.
        seconds: time limit in seconds; then the command is killed.
        env: environment of the command (default: that of this process).
        folder: working directory of the command (default: that of this process).
        text: standard input of the command.

    Raises:
        NoAnswerError: the command is missing, cannot start, or took too long.
    """
    try:
        done = subprocess.run(
            command, env=env, cwd=folder, input=text, capture_output=True, timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LateAnswerError(f"{command[0]}: no answer within {seconds:.0f} s") from None
    except FileNotFoundError:
        raise NoAnswerError(f"no {command[0]} on the PATH") from None
    except OSError as error:
        raise NoAnswerError(f"{command[0]}: {error}") from None
    # Not in text mode, which would change a line end in the name of a job.
    output = done.stdout.decode(errors="surrogateescape")
    errors = done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(command, done.returncode, output, errors)


def git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command in a folder; None if git is missing or fails."""
    try:
        done = run(["git", *words], _GIT_SECONDS, folder=folder)
    except NoAnswerError:
        return None
    return None if done.returncode else done.stdout.strip()
