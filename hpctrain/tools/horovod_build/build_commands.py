"""Functions that run other programs: for a short answer, or for minutes with log and progress."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PrintLine", "ask", "run"]

#: Function that prints one line for the user.
PrintLine = Callable[[str], None]

_SECONDS_BETWEEN_LINES = 30.0
_PERCENT = re.compile(rb"\[ *(\d+)%\]")  # progress that CMake's makefiles print
_TAIL_BYTES = 1 << 18  # enough for one progress line among many warnings


def ask(command: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int, str] | None:
    """Return exit code and output with standard error; None on a failed start or a timeout.

    A command that still runs at the end of this function is killed with its process group.
    """
    # `cluster.commands.run` would leave the command's own child processes, such as compilers.
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
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)
    return process.returncode, output


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    print_line: PrintLine,
    seconds: float = 7200.0,
) -> int:
    """Run a program to its end and return its exit code.

    A program that still runs when an exception ends this function is killed with its process group.

    Args:
        command: program and its arguments.
        env: environment of the program.
        log: file to which the output of the program is appended.
        print_line: function that prints, every 30 s, the elapsed time and the compiled percentage.
        seconds: time limit in seconds; then the program is killed, and its exit code is -9.
    """
    begun = last_line = time.monotonic()
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
                    if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
                        last_line = time.monotonic()
                        print_line(f"  {last_line - begun:.0f} s{_progress(log)}")
        finally:
            _kill(process)
    return process.returncode


def _kill(process: "subprocess.Popen[Any]") -> None:
    """Kill a program that still runs, with its process group, such as make and the compilers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _progress(log: Path) -> str:
    """Return the last percentage in the log as text; "" if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        found = _PERCENT.findall(file.read())
    return f", {int(found[-1])} % compiled" if found else ""
