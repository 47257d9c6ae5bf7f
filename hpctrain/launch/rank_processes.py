"""Processes of a start: one for each rank, and the fork server, which starts and ends them."""

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from hpctrain.cluster import env_vars, memory, system
from hpctrain.errors import StartError, UsageError
from hpctrain.launch import fork_server, missing_module
from hpctrain.launch.rank_output import TRACEBACK, Tail
from hpctrain.launch.stores import Stores
from hpctrain.process.failure_record import Failure

__all__ = [
    "Connections",
    "ForkServer",
    "Imports",
    "Rank",
    "no_program",
    "serve_stores",
    "signal_name",
]

_FEW_LINES = 3
_SECONDS_TO_END = 10.0  # it ends the ranks meanwhile
# Between two looks at the connections of the ranks, in seconds; for how long the first one lasts.
_FIRST_PAUSE, _LONGEST_PAUSE, _SECONDS_TO_CONNECT = 0.05, 10.0, 120.0
_SECONDS_TO_BE_SURE = 20.0


@dataclass(slots=True, eq=False)
class Rank:
    """Process of a rank, a child of the fork server.

    Attributes:
        number: number of the rank.
        command: program and arguments.
        pid: its process id. It leads its own session and process group. So it gets Ctrl-C only
            once, from this process, and its child processes can be ended with it.
        status: pipe on which the fork server tells its end.
        stderr: its standard error.
        stdout: its standard output; None if it has the terminal, and then it is in this process's
            group.
        tail: last lines of its standard error.
        code: exit code, or the negative number of the signal that ended it; None while it runs.
        ended: time of its end, in seconds of the monotonic clock.
        failure: record of its failure, if it has written one.
        shown: whether its traceback is already on standard error.
        kills: number of processes here that the kernel had killed for lack of memory before its
            start.
    """

    number: int
    command: Sequence[str]
    pid: int
    status: IO[bytes]
    stderr: IO[bytes]
    stdout: IO[bytes] | None = None
    tail: Tail = field(default_factory=Tail)
    code: int | None = None
    ended: float = float("inf")
    failure: Failure | None = None
    shown: bool = False
    kills: int = field(default_factory=memory.kills)

    def wait(self) -> None:
        """Wait until the process has ended; it keeps its id until the server's end."""
        how, _, number = self.status.readline().decode().partition(" ")
        self.ended = time.monotonic()
        # Without a line, the server was killed, and the kernel has killed the rank.
        self.code = int(number) if how == "exit" else -int(number or signal.SIGKILL)

    def signal(self, number: int, everything: bool = True) -> None:
        """Send a signal to the rank and its child processes, or to the rank alone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if everything and self.stdout is not None:
                os.killpg(self.pid, number)
            elif self.code is None:
                os.kill(self.pid, number)

    def close(self, output: bool = True) -> None:
        """Close the pipes; with `output`, also those with output that was not read."""
        self.status.close()
        for stream in (self.stdout, self.stderr) if output else ():
            if stream is not None:
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
            return f"{how}: {last}{missing_module.advice(last, self.command)}"
        if not output:
            return f"{how}, without output on standard error"
        if brief and code == -signal.SIGKILL:
            return how
        # They stand above, and without a traceback they are easy to find.
        first = -_FEW_LINES if brief and TRACEBACK not in output else 0
        lines = "".join(f"\n  {line}" for line in output.splitlines()[first:])
        return f"{how}. Its last lines:{lines}"

    def _lack_of_memory(self) -> str:
        """Return that the kernel has killed a process here for lack of memory; else empty."""
        if memory.kills() <= self.kills:
            return ""
        most = memory.limit()
        limit = "" if most is None else f" (limit there: {most / 2**30:.1f} GiB)"
        return f", after the kernel had killed a process on its host for lack of memory{limit}"


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


class Connections:
    """Look-out for TCP connections between ranks, which show that they train together.

    It needs no help of the program, which may connect its ranks in any way. It may miss a
    connection that ends within the pause between two looks.

    Args:
        here: number of ranks on this node.
        total: number of ranks of all nodes. If there are more than here, a connection to another
            machine counts, too.
        expected: whether the program connects its ranks, by its source.

    Attributes:
        seen: whether there was one.
        pause: seconds until the next look.
    """

    def __init__(self, here: int, total: int, expected: bool = False) -> None:
        self.seen = total == 1
        self._expected = expected
        self.pause = _FIRST_PAUSE
        self._several = total > here
        self._began = self._last = time.monotonic()

    def look(self, ranks: Sequence[Rank]) -> None:
        """Look at the connections of the ranks, if the pause is over."""
        now = time.monotonic()
        if self.seen or now - self._last < self.pause:
            return
        if now - self._began > _SECONDS_TO_CONNECT:
            self.pause = min(1.2 * self.pause, _LONGEST_PAUSE)
        self._last = now
        ends: set[tuple[str, str]] = set()
        for rank in ranks:
            if rank.code is None:
                own = system.connections(system.family(rank.pid))
                away = {end for end in own if _address(end[0]) != _address(end[1])}
                # Ports alone, as one end may have an IPv6 address and the other one IPv4.
                ports = {(_port(end[0]), _port(end[1])) for end in own - away}
                self.seen |= bool(self._several and away) or not ends.isdisjoint(ports)
                ends |= {(other, one) for one, other in ports}

    @property
    def possible(self) -> bool:
        """Whether there was a connection, or a short program may have had one."""
        lasted = time.monotonic() - self._began
        return self.seen or (self._expected and lasted < _SECONDS_TO_BE_SURE)


def _address(end: str) -> str:
    return end.partition(":")[0][-8:]


def _port(end: str) -> str:
    return end.partition(":")[2]


class Imports(NamedTuple):
    """What a fork server imports for the ranks, and how.

    Attributes:
        modules: modules, in order.
        python: interpreter of the ranks, with its options.
        environ: variables that all of them have.
        cores: cores of one of them, as libraries count the cores when they are loaded; None for
            all.
        folder: their working directory; None for that of this process.
    """

    modules: Sequence[str]
    python: Sequence[str]
    environ: Mapping[str, str]
    cores: Set[int] | None = None
    folder: str | None = None


class ForkServer:
    """The process that starts the ranks of this host and ends them; see `fork_server`.

    Args:
        folder: folder of this start only, which is removed if this process is killed; None to keep
            it.
        stores: sockets of the stores that it serves.
        imports: what it imports, so that it can fork ranks; None for new interpreters.
        terminal: whether a rank is to have the terminal of this process.

    Attributes:
        warm: whether it imports modules.
        obstacle: reason why a rank could not be forked; empty if there was none.
    """

    def __init__(
        self,
        folder: Path | None,
        stores: Stores | None = None,
        imports: Imports | None = None,
        terminal: bool = False,
    ) -> None:
        self.warm, self.obstacle = imports is not None, ""
        self._ready = False
        self._socket, remote = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        with remote:
            settings = {"launcher": remote.fileno(), "folder": str(folder or "")}
            self._process = _server(settings, stores, imports, terminal)

    def start(
        self,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        cores: Set[int] | None = None,
        folder: str | None = None,
        terminal: bool = False,
        forks: bool = False,
    ) -> Rank:
        """Start a rank.

        Args:
            number: number of the rank.
            command: program and arguments.
            environ: environment of the rank.
            cores: cores that the rank and its child processes may use; None for no change.
            folder: working directory; None for that of this process.
            terminal: whether it has this process's standard input and output, in the session of its
                terminal.
            forks: whether it is to be a copy of the server.

        Raises:
            UsageError: there is no such program.
            StartError: the system cannot start another process.
        """
        request = {
            "command": list(command),
            "environ": dict(environ),
            "cores": sorted(cores or ()),
            "folder": folder or os.getcwd(),
            "group": os.getpgrp() if terminal else 0,
            "forks": forks,
        }
        line = json.dumps(request).encode() + b"\n"
        own: list[int] = []
        remote: list[int] = []
        try:
            remote.append(os.dup(0) if terminal else os.open(os.devnull, os.O_RDONLY))
            if terminal:
                remote.append(os.dup(1))
            while len(remote) < fork_server.DESCRIPTORS:
                reader, writer = os.pipe()
                own.append(reader)
                remote.append(writer)
            socket.send_fds(self._socket, [line[:1]], remote)
            self._socket.sendall(line[1:])
            pid = self._pid_of_rank()
            *streams, stderr, status = own
            own = []
        except (FileNotFoundError, PermissionError) as error:
            raise no_program(command[0], error, environ) from None
        except OSError as error:
            raise StartError("HT212.no-process", rank=number, error=error) from None
        finally:
            for descriptor in (*remote, *own):
                os.close(descriptor)
        return Rank(
            number,
            command,
            pid,
            os.fdopen(status, "rb"),
            os.fdopen(stderr, "rb"),
            os.fdopen(streams[-1], "rb") if not terminal else None,
        )

    def _pid_of_rank(self) -> int:
        while True:
            kind, _, value = self._replies.readline().decode().strip().partition(" ")
            if kind == "fresh":
                self.obstacle = value
            elif kind == "pid":
                return int(value)
            elif kind != "ready":  # without a line, the server was killed
                number = int(value or errno.ECHILD)
                raise OSError(number, os.strerror(number))

    def is_ready(self, seconds: float) -> bool:
        """Return whether the server can start ranks; wait for it, up to some seconds.

        Raises:
            StartError: it has ended.
        """
        if not self._ready and select.select([self._socket], [], [], seconds)[0]:
            self._ready = bool(self._replies.readline())
            if not self._ready:
                raise StartError("HT212.no-process", rank=0, error="the fork server has ended")
        return self._ready

    def serve(self, stores: Stores) -> None:
        """Let the server serve the stores of the next attempt, until the next `sweep`."""
        modules = [module for _, module in stores.servers]
        line = json.dumps({"stores": modules}).encode() + b"\n"
        descriptors = [*(descriptor for descriptor, _ in stores.servers), stores.tells]
        with contextlib.suppress(OSError):  # it was killed, which the start of a rank notices
            socket.send_fds(self._socket, [line[:1]], descriptors)
            self._socket.sendall(line[1:])

    def sweep(self) -> bool:
        """End all processes of an attempt; return whether none is left, and the server is fine."""
        with contextlib.suppress(OSError):
            self._socket.sendall(b'{"sweep": true}\n')
            while line := self._replies.readline():
                if line.startswith(b"swept "):
                    return line == b"swept 0\n"
        return False

    @property
    def was_killed(self) -> bool:
        """Whether the server has ended by itself, and its ranks with it."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Let the server kill all remaining processes of the start, and end."""
        with contextlib.suppress(OSError):  # it was killed
            self._socket.sendall(b'{"end": true}\n')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        """Kill the server, and by that its ranks."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._replies.close()
        self._socket.close()


def serve_stores(stores: Stores) -> None:
    """Serve the stores while this process lives, which becomes a rank itself."""
    _server({}, stores, None)
    stores.hand_over()


def _server(
    settings: dict[str, Any], stores: Stores | None, imports: Imports | None, terminal: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a fork server with the fields of its `Settings`."""
    settings = {"parent": os.getpid(), **settings}
    descriptors = [settings["launcher"]] if "launcher" in settings else []
    if stores is not None:
        settings |= {"stores": stores.servers, "told": stores.tells}
        descriptors += [*(descriptor for descriptor, _ in stores.servers), stores.tells]
    start, environ, cores = [sys.executable, "-S", "-P"], env_vars.scrubbed(os.environ), None
    if imports is not None:  # then Python starts as in a rank
        settings["modules"] = imports.modules
        start, environ, cores = list(imports.python), dict(imports.environ), imports.cores
    return subprocess.Popen(
        [*start, fork_server.__file__, json.dumps(settings)],
        env=environ,
        cwd=imports.folder if imports else None,
        stdin=subprocess.DEVNULL,
        # The streams of a rank are pipes, and Python looks at them at its start.
        stdout=subprocess.PIPE if imports else subprocess.DEVNULL,
        stderr=subprocess.PIPE if imports else None,
        start_new_session=not terminal,
        process_group=0 if terminal else None,  # Ctrl-C is for the rank
        pass_fds=descriptors,
        preexec_fn=partial(system.bind, cores) if cores else None,  # noqa: PLW1509
    )
