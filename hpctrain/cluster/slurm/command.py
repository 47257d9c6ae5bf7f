"""The call of one Slurm command, with its output or the reason for its failure."""

from collections.abc import Mapping, Sequence

from hpctrain.cluster.commands import NoAnswerError, run

__all__ = ["SECONDS_TO_ANSWER", "NoAnswerError", "ask"]

SECONDS_TO_ANSWER = 10.0


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
    done = run(argv, seconds or SECONDS_TO_ANSWER, clean)
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NoAnswerError(f"{argv[0]}: {message}")
    return done.stdout
