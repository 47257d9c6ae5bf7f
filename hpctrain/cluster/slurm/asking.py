"""Commands of Slurm: what they print, and what a missing or late answer raises."""

import re
from collections.abc import Mapping, Sequence

from hpctrain.cluster.commands import NoAnswerError, run
from hpctrain.errors import StartError

SECONDS_TO_ANSWER = 10.0
_NUMBER = re.compile(r"(\d{1,9}(?:\.\d\d)?)([KM]?)", re.ASCII)


def ask(argv: Sequence[str], env: Mapping[str, str], seconds: float | None = None) -> str:
    """Run a command and return its standard output.

    Args:
        argv: command and its arguments.
        env: environment of the command.
        seconds: timeout in seconds (default: 10).

    Raises:
        NoAnswerError: the command is missing, took too long, or failed; the text has its standard
            error, or the fatal error in it.
    """
    # SQUEUE_STATES and similar variables, set by the user for lists, would filter the output.
    clean = {name: value for name, value in env.items() if not name.startswith("SQUEUE_")}
    done = run(argv, seconds or SECONDS_TO_ANSWER, clean)
    if done.returncode:
        lines = done.stderr.strip().split("\n")
        # Slurm's fatal() ends a command: it concludes from the lines before it.
        text = lines[-1] if ": fatal: " in lines[-1] else " ".join(lines)
        message = " ".join(text.removeprefix(f"{argv[0]}: ").split())
        raise NoAnswerError(f"{argv[0]}: {message or f'exit code {done.returncode}'}")
    return done.stdout


def exit_code(text: str) -> int:
    """Return the exit code from the status of wait(2), or from CODE:SIGNAL (Slurm 24.11)."""
    if ":" in text:
        code, signal = map(int, text.split(":"))
    else:
        code, signal = int(text) >> 8 & 0xFF, int(text) & 0x7F
    return code or (128 + signal if signal else 0)


def count(text: str) -> int:
    """Return a number as Slurm prints it: 768, but 2K for 2048; 0 for another text."""
    match = _NUMBER.fullmatch(text)
    return int(float(match[1]) * 1024 ** " KM".index(match[2] or " ")) if match else 0


def absent(reason: str, *instead: str) -> StartError:
    """Return the error for a missing command of Slurm, or one that did not answer.

    Args:
        reason: why there is no answer; has "on the PATH" if the command is missing.
        instead: what to do on a host without Slurm.
    """
    if "on the PATH" in reason:
        return StartError("HT815.no-slurm-commands", reason=reason, fixes=instead)
    return StartError("HT816.no-answer", reason=reason)
