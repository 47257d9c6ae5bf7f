"""Questions that may get no answer: other programs, and file systems that hang."""

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpctrain.cluster import env_vars

__all__ = ["SECONDS", "ask", "within"]

T = TypeVar("T")
SECONDS = 5.0
_KILLED_SECONDS = 1.0


def ask(command: Sequence[str], seconds: float = SECONDS) -> tuple[int, str] | None:
    """Exit code and standard output of a program, or what it said on standard error instead.

    Args:
        command: the program and its arguments.
        seconds: after which it is killed.

    Returns:
        None where it is not there, or does not answer in time. A negative code is a signal.
    """
    # A program that waits for a dead file server cannot be killed, and its end not be waited for.
    return within(seconds + _KILLED_SECONDS, lambda: _run(command, seconds))


def _run(command: Sequence[str], seconds: float) -> tuple[int, str] | None:
    try:
        done = subprocess.run(
            command,
            # A program that looks for a launcher shall not take itself for one of its ranks.
            env={**env_vars.scrubbed(os.environ), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout if done.stdout.strip() else done.stderr


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """What a function returns, or None where it takes longer: a server that is gone.

    The function goes on in a thread of its own, which does not keep the process.
    """
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
