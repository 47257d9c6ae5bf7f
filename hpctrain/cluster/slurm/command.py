"""The call of one Slurm command, with its output or the reason for its failure."""

import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["SECONDS_TO_ANSWER", "NoAnswerError", "ask"]

SECONDS_TO_ANSWER = 10.0


class NoAnswerError(Exception):
    """A Slurm command that is missing, failed, or took too long; the text has the reason."""


def ask(argv: Sequence[str], env: Mapping[str, str], seconds: float | None = None) -> str:
    """Run a command and return its standard output.

    Args:
        argv: command and its arguments.
        env: environment of the command.
        seconds: timeout in seconds (default: 10).

    Raises:
        NoAnswerError: the command is missing, took too long, or failed; the text has its standard
            error.
    """
    # SQUEUE_STATES and similar variables, set by the user for lists, would filter the output.
    clean = {name: value for name, value in env.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            argv, env=clean, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=seconds or SECONDS_TO_ANSWER, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{argv[0]}: no answer within {error.timeout:.0f} s") from None
    except FileNotFoundError:
        raise NoAnswerError(f"no {argv[0]} on the PATH") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NoAnswerError(str(error)) from None
    if done.returncode:
        said = (
            " ".join(done.stderr.decode(errors="replace").split()) or f"left with {done.returncode}"
        )
        raise NoAnswerError(f"{argv[0]}: {said}")
    # Not in text mode, which would change a line end in a job's name.
    return done.stdout.decode(errors="surrogateescape")
