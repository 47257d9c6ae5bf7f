"""Other programs: asked for a line, or run for minutes with a log and a sign of life."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Say", "ask", "run"]

#: Tells a person one line.
Say = Callable[[str], None]

_SECONDS_BETWEEN_LINES = 30.0
_PERCENT = re.compile(rb"\[ *(\d+)%\]")  # of make, as CMake lets it count
_TAIL_BYTES = 1 << 18  # a compilation tells one line of it, among warnings


def ask(command: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int, str] | None:
    """Exit code and output, standard error included; None where there is none in that time.

    What it started in its process group ends with it.
    """
    try:
        process = subprocess.Popen(
            command,
            env={**env, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)
    return process.returncode, said


def run(
    command: Sequence[str], env: Mapping[str, str], log: Path, say: Say, seconds: float = 7200.0
) -> int:
    """Run a program to its end; its exit code. It is not left behind, however this one ends.

    Args:
        command: the program and its arguments.
        env: its environment.
        log: what it says is added to this file.
        say: told every half minute how long it has been, and the compiler's per cent.
        seconds: after which it is killed; its exit code is -9 then.
    """
    begun = told = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode(errors="replace"))
        output.flush()
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while time.monotonic() - begun < seconds:
                try:
                    return process.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    if time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
                        told = time.monotonic()
                        say(f"  {told - begun:.0f} s{_progress(log)}")
        finally:
            _kill(process)
    return process.returncode


def _kill(process: "subprocess.Popen[Any]") -> None:
    """End a program that still runs, with all of its group, such as make and the compilers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _progress(log: Path) -> str:
    """The last per cent that make told."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        found = _PERCENT.findall(file.read())
    return f", {int(found[-1])} % compiled" if found else ""
