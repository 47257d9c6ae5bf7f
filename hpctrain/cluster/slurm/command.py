"""One command of Slurm's: its answer, or why there is none."""

import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["SECONDS_TO_ANSWER", "NoAnswerError", "ask"]

SECONDS_TO_ANSWER = 10.0


class NoAnswerError(Exception):
    """A command of Slurm's is not here, failed, or took too long; the text says which."""


def ask(argv: Sequence[str], env: Mapping[str, str], seconds: float | None = None) -> str:
    """The answer of a command.

    Args:
        argv: the command.
        env: for it.
        seconds: to wait for it (default: 10).

    Raises:
        NoAnswerError: with what it said where it failed.
    """
    # SQUEUE_STATES and its like would filter the answer as the user likes to see lists.
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
    # Not as text: a line end in a job's name stays what it is.
    return done.stdout.decode(errors="surrogateescape")
