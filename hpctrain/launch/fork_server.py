"""Program that is the parent of the ranks of a start: it starts them, reaps them, and ends them.

    python fork_server.py JSON          an object with the fields of `Settings`

The launcher sends a request as a line of JSON. That for a rank comes with four file descriptors:
standard input, output and error, and a pipe for a line about its end. The rank is in a session of
its own, or in a process group of the launcher's terminal (`group`):

    launcher → server   {"command": […], "environ": {…}, "cores": […], "folder": "…",
                         "group": 0, "forks": true}
                        {"stores": ["…"]}   with a listening socket for each, and a descriptor
                        {"sweep": true}     end all ranks, for the next attempt
                        {"end": true}       a regular end; else the folder of the start is removed
    server → launcher   ready               once, when it can start ranks
                        swept 0             number of processes that did not end
                        pid 4711            the rank runs
                        fresh REASON        before it: the rank was to be forked, and was not
                        error 2             number of the system's error: the rank does not run
    on the pipe         exit 0, signal 9    the rank has ended

If there are modules to import, this process is **warm** when it has imported them. A rank that
`forks` is then a copy of it, which runs the script (`forked_rank`). So the import is done once, and
not in each rank. It computes nothing, runs no thread and opens no accelerator, as none of them
survives a fork. Without modules it needs only the standard library, and each rank is a new program.

As a subreaper (prctl(2)), this process becomes the parent of all processes below it that lose
theirs. So it finds all processes that the ranks have started, and kills them at its end: when the
launcher asks for it, or has ended. If this process is killed, the kernel kills the ranks, or
the launcher where there is no prctl(2).

It also waits for the first client of each of the listening `stores`, and then runs its server. So a
server that has to import torch costs nothing in a start that does not need it. Each of these starts
is a line on `told`. A sweep ends the servers, too: no rank finds the store of an earlier attempt.
Without a launcher this process does nothing else.
"""

import sys

# For the ranks: what Python has imported, and set in `__main__`, before the first line of a script.
_IMPORTED = frozenset(sys.modules)
_MAIN = dict(globals())

import contextlib  # noqa: E402
import errno  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
import types  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from importlib.machinery import SourceFileLoader  # noqa: E402
from typing import TYPE_CHECKING, Any, NamedTuple  # noqa: E402


def _load(*place: str) -> Any:
    """Load a module of hpctrain that needs only the standard library.

    This program may not be able to import hpctrain, and the ranks are not to find the module.
    """
    name = f"_{place[-1].partition('.')[0]}_of_fork_server"
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), *place)
    module = types.ModuleType(name)
    SourceFileLoader(name, path).exec_module(module)
    return module


if TYPE_CHECKING:
    from hpctrain.cluster import system
    from hpctrain.launch.forked_rank import WarmProcess
else:
    system = _load("..", "cluster", "system.py")

_SECONDS_BETWEEN_LOOKS = 1.0
# A process that is being killed may still start other processes.
_SECONDS_TO_SWEEP = 5.0
__all__ = ["DESCRIPTORS", "Settings", "main"]

DESCRIPTORS = 4  # of a request for a rank
_CHUNK = 1 << 16

# A scheduler sends them to all processes of a step.
_SENT = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Python ignores them. A new program gets the system's default, as `subprocess` gives it.
_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Settings(NamedTuple):
    """What the launcher tells this process.

    Attributes:
        parent: process id of the launcher.
        launcher: file descriptor of the socket to the launcher; -1 without one.
        folder: folder to remove if the launcher ends without a word; empty for none.
        modules: modules to import.
        stores: file descriptor of each listening socket, and the module of its server, which is
            run with the number as its argument.
        told: file descriptor for a line at each start of a server.
    """

    parent: int = 0
    launcher: int = -1
    folder: str = ""
    modules: Sequence[str] = ()
    stores: Sequence[tuple[int, str]] = ()
    told: int = -1


class _Server:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._launcher = socket.socket(fileno=settings.launcher) if settings.launcher >= 0 else None
        self._stores = dict(settings.stores)
        self._told = settings.told
        self._poll = select.poll()
        for descriptor in {settings.launcher, settings.told, *self._stores} - {-1}:
            os.set_inheritable(descriptor, False)
        self._ranks: dict[int, int] = {}  # pipe of each rank by process id; -1 once it has ended
        self._regular = False
        self._rest, self._received = b"", list[int]()
        self._before = {
            number: signal.signal(number, lambda *_: None)
            for number in (*_SENT, signal.SIGCHLD)
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD
        }
        self._wakes, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._warm: WarmProcess | None = None

    def warm_up(self) -> None:
        """Import the modules."""
        if not self._settings.modules:
            return
        if not sys.flags.safe_path:
            del sys.path[0]
        forked_rank = _load("forked_rank.py")
        self._warm = forked_rank.WarmProcess(self._settings.modules, _IMPORTED, _MAIN, system)

    def serve(self) -> bool:
        """Handle requests, and run the servers of the stores, until the end.

        Returns:
            Whether this is the process of a forked rank, whose program has ended.
        """
        poll = self._poll
        poll.register(self._wakes, select.POLLIN)
        for descriptor in self._stores:
            poll.register(descriptor, select.POLLIN)
        if self._launcher is not None:
            poll.register(self._launcher, select.POLLIN)
            self._reply("ready")
        while True:
            ready = [one for one, _ in poll.poll(_SECONDS_BETWEEN_LOOKS * 1000)]
            if self._wakes in ready:
                os.read(self._wakes, _CHUNK)
                self._reap()
            for descriptor in [one for one in ready if one in self._stores]:
                poll.unregister(descriptor)
                command = self._serve_store(descriptor)
                if command:
                    return self._run(command, dict(os.environ))
            if self._launcher is not None and self._launcher.fileno() in ready:
                has_ended = not self._receive()
                rank = self._handle()
                if rank is not None:
                    return self._run(rank["command"], rank["environ"])
                if has_ended or self._regular:
                    break
            # Another child of the launcher may hold the socket open.
            if not ready and os.getppid() != self._settings.parent:
                break
        self._end()
        return False

    def _run(self, command: list[str], environ: dict[str, str]) -> bool:
        assert self._warm is not None
        self._warm.run(command, environ)
        return True

    def _receive(self) -> bool:
        """Receive what the launcher has sent; return whether it still lives."""
        assert self._launcher is not None
        try:
            data, more, _, _ = socket.recv_fds(self._launcher, _CHUNK, 16 * DESCRIPTORS)
        except ConnectionError:  # it had not read all answers
            return False
        for descriptor in more:  # Python 3.11 does not pass on MSG_CMSG_CLOEXEC
            os.set_inheritable(descriptor, False)
        self._rest += data
        self._received += more
        return bool(data)

    def _handle(self) -> dict[str, Any] | None:
        """Handle what the launcher has sent; in a forked rank, return its request."""
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            request: dict[str, Any] = json.loads(line)
            if "end" in request:
                self._regular = True
                return None
            if "stores" in request:
                self._take_stores(request["stores"])
                continue
            if "sweep" in request:
                self._forget_stores()
                left = self._sweep()
                for status in self._ranks.values():
                    if status >= 0:
                        os.close(status)  # without a line, it was killed
                self._ranks.clear()
                self._reply(f"swept {left}")
                continue
            own, self._received = self._received[:DESCRIPTORS], self._received[DESCRIPTORS:]
            if self._start(request, own):
                return request
        return None

    def _take_stores(self, modules: Sequence[str]) -> None:
        """Take the sockets of the next attempt's stores, and the descriptor for their lines."""
        self._forget_stores()
        *sockets, self._told = self._received[: len(modules) + 1]
        del self._received[: len(modules) + 1]
        self._stores = dict(zip(sockets, modules, strict=True))
        for descriptor in self._stores:
            self._poll.register(descriptor, select.POLLIN)

    def _forget_stores(self) -> None:
        for descriptor in self._stores:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        if self._told >= 0:
            os.close(self._told)
        self._stores, self._told = {}, -1

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        """Start a rank; return whether this is now the process of a forked rank."""
        status = descriptors[-1]
        if request["forks"]:
            assert self._warm is not None
            obstacle = self._warm.obstacle(request["command"], request["folder"])
            if obstacle:
                request["forks"] = False
                self._reply(f"fresh {obstacle}")
        failed, fails = os.pipe()
        # A signal that arrives before the rank has its own handlers would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            os.close(status)
            self._reply(f"error {error.errno}")
        if pid == 0:
            self._become(request, [*descriptors, failed, fails], mask)
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in (*descriptors[:-1], fails):
            os.close(descriptor)
        if pid > 0:
            number = os.read(failed, 16).decode()
            self._reply(f"error {number}" if number else f"pid {pid}")
            self._ranks[pid] = status
        os.close(failed)
        return False

    def _become(self, request: dict[str, Any], descriptors: list[int], mask: set[int]) -> None:
        """Become a rank, in its new process; return only in a forked one."""
        try:
            if request["group"]:
                os.setpgid(0, request["group"])
            else:
                os.setsid()
            system.end_with(self._pid)
            if request["cores"]:
                system.bind(request["cores"])
            if request["folder"]:
                os.chdir(request["folder"])
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            if not request["forks"]:
                for number in _OF_PYTHON:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                command = request["command"]
                os.execvpe(command[0], command, request["environ"])  # noqa: S606
        except Exception as error:  # or it would go on as a second server
            _tell(descriptors[-1], b"%d" % (getattr(error, "errno", None) or errno.EINVAL))
            os._exit(1)
        assert self._launcher is not None
        # The object would close it at its own end, when its number may be that of another file.
        own = {self._launcher.detach(), self._wakes, self._woken, self._told}
        own |= {*descriptors, *self._received, *self._stores, *self._ranks.values()}
        for descriptor in own - {-1, 0, 1, 2}:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _reap(self) -> None:
        """Report the ranks that have ended, and reap all other children that have."""
        for pid, status in self._ranks.items():
            if status >= 0:
                # It keeps its id until the end, as its process group has the same one.
                ended = system.ended(pid)
                if ended is not None:
                    _tell(status, b"%s %d\n" % (b"exit" if ended[0] else b"signal", ended[1]))
                    os.close(status)
                    self._ranks[pid] = -1
        for pid in set(system.children(self._pid)) - self._ranks.keys():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _reply(self, text: str) -> None:
        assert self._launcher is not None
        _tell(self._launcher.fileno(), f"{text}\n".encode())

    def _serve_store(self, descriptor: int) -> list[str]:
        """Run the server of a listening socket; return its command in a copy of this process."""
        command = [sys.executable, "-m", self._stores.pop(descriptor), str(descriptor)]
        _tell(self._told, b"used\n")
        pid = -1
        with contextlib.suppress(OSError):  # without the server, its clients are refused
            pid = os.fork()
        if pid != 0:
            os.close(descriptor)
            return []
        null = os.open(os.devnull, os.O_RDWR)
        forks = self._warm is not None and not self._warm.obstacle(command, None)
        request = {"group": 0, "cores": (), "folder": "", "forks": forks}
        # torch warns of clients without a reverse name, also in a warm process.
        environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        streams = [null, null, null if self._warm else os.dup(2)]
        os.set_inheritable(descriptor, True)
        self._become({**request, "command": command, "environ": environ}, streams, set())
        return command

    def _end(self) -> None:
        self._sweep()
        if self._settings.folder and not self._regular:
            shutil.rmtree(self._settings.folder, ignore_errors=True)

    def _sweep(self) -> int:
        """Kill all ranks, and all processes that they have started; return how many are left."""
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + _SECONDS_TO_SWEEP
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                # The children of a killed process become those of this one.
                for pid in system.children(self._pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.001)
            return len(list(system.children(self._pid)))
        return 0


def main() -> None:
    """Import the modules, serve, and end the ranks."""
    settings = Settings(**json.loads(sys.argv[1]))
    server = _Server(settings)
    if settings.launcher < 0:
        system.end_with(settings.parent)
    system.adopt_descendants()
    server.warm_up()
    if not server.serve():
        os._exit(0)  # without what the imported modules do at the end of a program


def _tell(descriptor: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(descriptor, line)


if __name__ == "__main__":
    main()
