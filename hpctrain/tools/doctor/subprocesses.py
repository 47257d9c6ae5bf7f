"""Calls with a time limit, for other programs and for file systems that hang."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpctrain.cluster import commands, env_vars

__all__ = ["SECONDS", "ask", "within"]

T = TypeVar("T")
SECONDS = 5.0
_KILLED_SECONDS = 1.0


def ask(command: Sequence[str], seconds: float = SECONDS) -> tuple[int, str] | None:
    """Run a program and return its exit code and output.

    Args:
        command: program and its arguments.
        seconds: time limit in seconds, after which the program is killed.

    Returns:
        Exit code and standard output, or standard error where standard output is empty, without
        white space around it. A negative code is a signal. None where the program does not start,
        or does not end in time.
    """
    # With a launcher's variables, the program could take itself for one of the ranks.
    env = {**env_vars.scrubbed(os.environ), "LC_ALL": "C"}

    def run() -> tuple[int, str] | None:
        try:
            done = commands.run(command, seconds, env)
        except commands.NoAnswerError:
            return None
        return done.returncode, (done.stdout.strip() or done.stderr).strip()

    # A program that waits for a dead file server cannot be killed, so limit the wait as well.
    return within(seconds + _KILLED_SECONDS, run)


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Call a function; return its result, or None where it takes longer or raises an error.

    A function that takes longer, such as one that waits for a dead file server, continues in a
    daemon thread, which does not keep the process alive.
    """
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
