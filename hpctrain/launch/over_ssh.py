"""Start of ranks on hosts over ssh, with horovodrun."""

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpctrain.cluster import commands, env_vars
from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.errors import UsageError
from hpctrain.launch import guard, horovodrun_rank, supervisor
from hpctrain.launch.hosts import Attempt, HostsEnd
from hpctrain.launch.rank_output import write_stderr
from hpctrain.rendezvous.interfaces import addresses, interface_of

__all__ = ["OverSsh"]

# The options of horovodrun, and no prompts. A lost host is detected after 15 seconds.
_SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_SECONDS_TO_ANSWER = 30.0
# Variables that horovodrun and ssh need; the ranks get all others from a file.
_OF_HOROVODRUN = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "PYTHONPATH"),
    *("LD_LIBRARY_PATH", "SSH_AUTH_SOCK", "KRB5CCNAME", "HOROVOD_START_TIMEOUT"),
)


class OverSsh:
    """Hosts that ssh reaches. horovodrun starts the ranks; its own elastic mode is not used.

    On each remote host a guard runs over an ssh connection. It ends the ranks there when the
    connection breaks, so no rank keeps running after any process was killed. A broken connection
    also shows that the host is lost, long before a rank would detect it.

    Raises:
        UsageError: ssh or horovodrun is missing on this host.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._slots = slots
        self.names: Sequence[str] = list(slots)
        self._horovodrun = _horovodrun()
        self._remote = [host for host in slots if not _is_here(host)]
        if self._remote and shutil.which("ssh") is None:
            raise UsageError(
                "HT211", "no ssh here", "ssh, over which horovodrun starts ranks", "PATH=…"
            )

    def ranks(self, host: str) -> int:
        """Return the number of ranks of a host."""
        return self._slots[host]

    def fixes(self, host: str) -> Sequence[str]:
        """Return what to type if a host does not answer."""
        return (f"ssh {host} true (shows the reason)", f"leave {host} out of --hosts")

    def present(self, launch: str) -> list[str]:
        """Return the hosts that answer over ssh; the guard ends processes of earlier attempts."""
        marker = f"{env_vars.START}={launch}"

        def check(host: str) -> str:
            command = [*_SSH, host, _guard(marker)]
            try:
                result = commands.run(command, _SECONDS_TO_ANSWER, text=b"end\n")
            except commands.NoAnswerError as error:
                return str(error)
            if result.returncode == 0:
                return ""
            return result.stderr.strip() or f"exit code {result.returncode}"

        with ThreadPoolExecutor(max(1, min(32, len(self._remote)))) as pool:
            failures = dict(zip(self._remote, pool.map(check, self._remote), strict=True))
        for host, reason in failures.items():
            if reason:
                write_stderr(f"hpctrain: {host} does not answer over ssh: {reason}\n")
        return [host for host in self.names if not failures.get(host)]

    def run(self, hosts: Sequence[str], attempt: Attempt) -> HostsEnd:
        """Run horovodrun, and end it when a host is lost."""
        ranks = sum(self._slots[host] for host in hosts)
        exit_status_file = attempt.folder / "exit-status-0"
        environ = dict(attempt.environ)
        if "SLURM_JOB_ID" in environ:
            environ["SLURM_NTASKS"] = str(ranks)  # as srun sets it in a step
        file = attempt.folder / "start"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
            own = {**environ, env_vars.EXIT_STATUS_FILE: str(exit_status_file)}
            own[env_vars.EVIDENCE] = str(attempt.folder)
            json.dump({"environ": own, "command": list(attempt.command)}, stream)
        launcher_environ = {name: environ[name] for name in _OF_HOROVODRUN if name in environ}
        remote = [host for host in hosts if host in self._remote]
        command = [
            *(*self._horovodrun, "-np", str(ranks), "--gloo", "--disable-cache"),
            *("-H", ",".join(f"{host}:{self._slots[host]}" for host in hosts)),
            # Otherwise horovodrun first tries all interfaces of all hosts. Ranks find their own.
            *(("--network-interfaces", _interface(remote[0], environ)) if remote else ()),
            *(sys.executable, "-S", "-P", horovodrun_rank.__file__, str(file)),
        ]
        events: supervisor.Events = queue.SimpleQueue()
        marker = f"{env_vars.EXIT_STATUS_FILE}={exit_status_file}"
        with _guarded(remote, marker, events) as lost:
            outcome = supervisor.run(
                command,
                {0: launcher_environ},
                exit_status_file,
                labelled=False,
                bind=False,
                events=events,
                temporary=False,
            )
            return HostsEnd(outcome.code, outcome.signal is not None and not lost)


@contextlib.contextmanager
def _guarded(hosts: Sequence[str], marker: str, events: supervisor.Events) -> Iterator[list[str]]:
    """Run a guard on each host and yield the list of lost hosts; a lost host ends the start."""
    lost: list[str] = []
    over = threading.Event()

    def watch(host: str, connection: "subprocess.Popen[bytes]") -> None:
        connection.wait()
        if not over.is_set():
            write_stderr(f"hpctrain: the connection to {host} is lost: its ranks are ended\n")
            lost.append(host)
            events.put(signal.SIGTERM)

    connections = [
        subprocess.Popen(
            [*_SSH, host, _guard(marker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    ]
    threads = [
        threading.Thread(target=watch, args=pair, daemon=True)
        for pair in zip(hosts, connections, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        yield lost
    finally:
        over.set()
        for connection in connections:
            # The end of its input makes the guard end the ranks.
            assert connection.stdin is not None
            with contextlib.suppress(OSError):
                connection.stdin.close()
        for connection in connections:
            try:
                connection.wait(_SECONDS_TO_ANSWER)
            except subprocess.TimeoutExpired:
                connection.kill()
        for thread in threads:
            thread.join()


def _guard(marker: str) -> str:
    """Return the command line of a guard, for the shell of another host."""
    return shlex.join([sys.executable, "-S", "-P", guard.__file__, "0", marker])


def _horovodrun() -> list[str]:
    """Return the command of horovodrun: beside this Python, else from PATH."""
    beside = Path(sys.executable).with_name("horovodrun")
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise UsageError(
            "HT211",
            f"no horovodrun beside {sys.executable} or on PATH",
            "Horovod's launcher, which starts the ranks over ssh",
            "hpctrain horovod build",
            "in a Slurm job: leave --hosts out, and srun starts them",
        )
    return [sys.executable, found]


def _is_here(host: str) -> bool:
    """Return whether a name is a name of this host."""
    address = _address(host)
    return is_loopback(address) or any(address in own for own in addresses().values())


def _address(host: str) -> str:
    """Return the address of a host; if the lookup fails, the name, which ssh may still resolve."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def _interface(host: str, env: Mapping[str, str]) -> str:
    """Return the name of the interface over which this host reaches another one."""
    if env.get(env_vars.INTERFACE):
        return env[env_vars.INTERFACE]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_address(host), 9))  # UDP, so nothing is sent
        except OSError as error:
            raise UsageError(
                "HT210",
                f"no way from here to {host}: {error}",
                "an address that this host reaches",
                f"export {env_vars.INTERFACE}=NAME",
            ) from None
        return interface_of(probe.getsockname()[0]) or "eth0"
