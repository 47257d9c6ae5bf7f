"""Processes of a start: one for each rank, and the guard that ends them if the launcher cannot."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hpctrain.cluster import env_vars, memory
from hpctrain.errors import StartError, UsageError
from hpctrain.launch import guard
from hpctrain.launch.rank_output import TRACEBACK, Tail
from hpctrain.process.failure_record import Failure

__all__ = ["Guard", "Rank", "no_program", "signal_name"]

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^'.]+)")


@dataclass(slots=True, eq=False)
class Rank:
    """Process of a rank.

    Attributes:
        number: number of the rank.
        process: process, which leads its own session and process group. So it gets Ctrl-C only
            once, from this process, and its child processes can be ended with it.
        tail: last lines of its standard error.
        code: exit code, or the negative number of the signal that ended it; None while it runs.
        ended: time of its end, in seconds of the monotonic clock.
        failure: record of its failure, if it has written one.
        shown: whether its traceback is already on standard error.
        kills: number of processes here that the kernel had killed for lack of memory before its
            start.
    """

    number: int
    process: "subprocess.Popen[bytes]"
    tail: Tail = field(default_factory=Tail)
    code: int | None = None
    ended: float = float("inf")
    failure: Failure | None = None
    shown: bool = False
    kills: int = field(default_factory=memory.kills)

    @classmethod
    def start(
        cls,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        cores: Set[int] | None = None,
        folder: str | None = None,
        stdin: int | None = subprocess.DEVNULL,
    ) -> "Rank":
        """Start a rank.

        Args:
            number: number of the rank.
            command: program and arguments.
            environ: environment of the rank.
            cores: cores that the rank and its child processes may use, if this process has no other
                threads; None for no change.
            folder: working directory; None for that of this process.
            stdin: its standard input, as `subprocess.Popen` takes it.

        Raises:
            UsageError: there is no such program.
            StartError: the system cannot start another process.
        """
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                cwd=folder,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=partial(os.sched_setaffinity, 0, cores) if cores else None,  # noqa: PLW1509, see above
            )
        except (FileNotFoundError, PermissionError) as error:
            raise no_program(command[0], error, environ) from None
        except OSError as error:
            raise StartError("HT212.no-process", rank=number, error=error) from None
        return cls(number, process)

    def begin(self, number: int, environ: Mapping[str, str]) -> None:
        """Let a rank begin that waits on a pipe; see `standby`.

        Args:
            number: its number.
            environ: its environment, from which it may have been started with other values.
        """
        self.number = number
        stream = self.process.stdin
        assert stream is not None
        with contextlib.suppress(OSError):  # it has ended, which is noticed by `wait`
            stream.write(f"{json.dumps(dict(environ))}\n".encode())
            stream.close()

    def wait(self) -> None:
        """Wait until the process has ended; it keeps its id until `reap`, so signals are safe."""
        try:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # other code in this process has reaped it
            status = None
        self.ended = time.monotonic()
        if status is None:
            self.code = self.process.wait()
        else:
            exited = status.si_code == os.CLD_EXITED
            self.code = status.si_status if exited else -status.si_status

    def signal(self, number: int, everything: bool = True) -> None:
        """Send a signal to the rank and its child processes, or to the rank alone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if everything:
                os.killpg(self.process.pid, number)
            elif self.code is None:
                os.kill(self.process.pid, number)

    def reap(self, close: bool) -> None:
        """Reap the process after its end; `close` closes its output without reading the rest."""
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if close and stream is not None:
                stream.close()

    @property
    def traceback(self) -> str:
        """Traceback in its last lines, without the title; empty without one."""
        return self.tail.text().partition(TRACEBACK)[2]

    def describe_end(self, brief: bool = False, only: bool = False, before: str = "") -> str:
        """Describe how the rank ended, with its last lines.

        Args:
            brief: whether to leave out a traceback that is already on standard error, if the rank
                has written a failure record.
            only: whether no other rank has printed another traceback; then its own is easy to
                find, and is left out as well.
            before: what happened before, from a comma on.
        """
        code = self.code or 0
        how = f"with exit code {code}" if code >= 0 else f"with signal {signal_name(-code)}"
        how += self._lack_of_memory() + before
        if brief and self.failure is not None:
            text = self.failure.traceback if not self.shown else ""
            return f"{how}: {self.failure.description}" + (f"\n{text.rstrip()}" if text else "")
        output = self.tail.text()
        if brief and only and TRACEBACK in output:
            last = output.splitlines()[-1]
            return f"{how}: {last}{self._how_to_install(last)}"
        lines = "".join(f"\n  {line}" for line in output.splitlines())
        if not output:
            return f"{how}, without output on standard error"
        return f"{how}. Its last lines:{lines}"

    def _lack_of_memory(self) -> str:
        """Return that the kernel has killed a process here for lack of memory; else empty."""
        if memory.kills() <= self.kills:
            return ""
        most = memory.limit()
        limit = "" if most is None else f" (limit there: {most / 2**30:.1f} GiB)"
        return f", after the kernel had killed a process on its host for lack of memory{limit}"

    def _how_to_install(self, error: str) -> str:
        """Return what to type after the error of a missing package; empty for other errors."""
        missing = _MISSING.search(error)
        if missing is None:
            return ""
        program = str(self.process.args[0])  # type: ignore[index]
        python = program if "python" in os.path.basename(program) else "python"
        return (
            f"\n  fix:      activate the environment with {missing[1]} before hpctrain run"
            f"\n  or:       {python} -m pip install {missing[1]}"
        )


def no_program(name: str, error: OSError, environ: Mapping[str, str]) -> UsageError:
    """Return the error for a program that cannot be started with an environment."""
    # If a folder on the PATH cannot be searched, the system denies permission to any name.
    absent = shutil.which(name, os.F_OK, environ.get("PATH")) is None
    reason = os.strerror(errno.ENOENT) if absent else error.strerror
    return UsageError("HT806.cannot-start", program=name, reason=reason)


def signal_name(number: int) -> str:
    """Return the name of a signal; most realtime signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Guard:
    """Process that ends the ranks when this process has ended; see `guard`.

    Args:
        exit_status_file: path in $HPCTRAIN_EXIT_STATUS_FILE, which only the processes of
            this start have in their environment. Its folder belongs to this start only.
        temporary: whether the guard removes that folder if this process is killed.
    """

    def __init__(self, exit_status_file: Path, temporary: bool) -> None:
        marker = f"{env_vars.EXIT_STATUS_FILE}={exit_status_file}"
        folders = [str(exit_status_file.parent)] if temporary else []
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", guard.__file__, str(os.getpid()), marker, *folders],
            # With the marker of an outer start, that start's guard would end this guard.
            env=env_vars.scrubbed(os.environ),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, rank: Rank) -> None:
        """Add a rank to the guard's list."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed; the start works without it
            self._process.stdin.write(f"{rank.process.pid}\n".encode())
            self._process.stdin.flush()

    def end(self) -> None:
        """Make the guard end all remaining processes; call this before any rank is reaped."""
        self._process.communicate(b"end\n")
