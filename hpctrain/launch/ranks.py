"""Processes: one for each rank, and the guard that ends them when nobody else can."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.errors import StartError
from hpctrain.launch import guard
from hpctrain.launch.rank_output import Tail
from hpctrain.process.failure_record import Failure

__all__ = ["Guard", "Rank", "die_with_parent"]

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Even a kill -9 of the process that started this one ends it: prctl(2)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True, eq=False)
class Rank:
    """A process that was started as a rank.

    Attributes:
        number: the rank.
        process: leads a session and a process group of its own, so that Ctrl-C reaches it once,
            from here, and whatever it starts can be ended with it.
        tail: the last of what it said on standard error.
        code: that it left with, or the negative number of the signal that ended it; None while it
            runs.
        ended: when, in seconds of the monotonic clock.
        failure: what it has left of how it failed, if anything.
        shown: whether its traceback is on standard error.
    """

    number: int
    process: "subprocess.Popen[bytes]"
    tail: Tail = field(default_factory=Tail)
    code: int | None = None
    ended: float = float("inf")
    failure: Failure | None = None
    shown: bool = False

    @classmethod
    def start(
        cls, number: int, command: Sequence[str], environ: Mapping[str, str], bind: bool
    ) -> "Rank":
        """Start a rank.

        Args:
            number: the rank.
            command: program and arguments.
            environ: its environment.
            bind: call `die_with_parent` in the new process; only where no thread runs here.

        Raises:
            StartError: the system does not let another process start.
        """
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent if bind else None,  # noqa: PLW1509, see above
            )
        except OSError as error:
            raise StartError(
                f"rank {number} cannot be started on this machine: {error}",
                "room for each rank: processes, open files, memory",
                "fewer ranks, or ulimit -u and ulimit -n with larger numbers",
            ) from None
        return cls(number, process)

    def wait(self) -> None:
        """Until it has ended. Its id stays its own until `reap`: no other process is hit by it."""
        try:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody else in this process took the answer
            status = None
        self.ended = time.monotonic()
        if status is None:
            self.code = self.process.wait()
        else:
            exited = status.si_code == os.CLD_EXITED
            self.code = status.si_status if exited else -status.si_status

    def signal(self, number: int, everything: bool = True) -> None:
        """To the rank and all that it started, or to the rank alone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if everything:
                os.killpg(self.process.pid, number)
            elif self.code is None:
                os.kill(self.process.pid, number)

    def reap(self, close: bool) -> None:
        """Forget the process, which has ended or been killed; close its output unread?"""
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if close and stream is not None:
                stream.close()

    def how(self, brief: bool = False) -> str:
        """How it ended, and its last words; for people.

        Args:
            brief: leave out what is on standard error already, where the rank has left its reason.
        """
        code = self.code or 0
        how = f"with exit code {code}" if code >= 0 else f"with signal {_name(-code)}"
        if brief and self.failure is not None:
            text = self.failure.traceback if not self.shown else ""
            return f"{how}: {self.failure.words}" + (f"\n{text.rstrip()}" if text else "")
        said = self.tail.text()
        lines = "".join(f"\n  {line}" for line in said.splitlines())
        return f"{how}. It said:{lines}" if said else f"{how}. It said nothing on standard error."


def _name(number: int) -> str:
    """Of a signal; the realtime ones in the middle have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Guard:
    """The process that ends the ranks when this one is gone; see `guard`.

    Args:
        verdict: the file that $HPCTRAIN_VERDICT names: it is in the environment of this start's
            processes and of no others. Its folder is this start's own.
    """

    def __init__(self, verdict: Path) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-P", guard.__file__),
                *(str(os.getpid()), f"{env_vars.VERDICT}={verdict}", str(verdict.parent)),
            ],
            # A marker of an outer start would let that one's guard end this one.
            env=env_vars.scrubbed(os.environ),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def know(self, rank: Rank) -> None:
        """Watch over one more."""
        self._say(str(rank.process.pid))

    def end(self) -> None:
        """Let it end what is left now; to be called while no rank has been reaped."""
        self._say("end")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it; the rest still works
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
