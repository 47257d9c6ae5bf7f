"""What the operating system knows about processes, cores, memory and files.

No other module asks Linux. Without its /proc, as on macOS, ps(1) and the standard library answer,
or the answer is "unknown", which callers accept. It needs only the standard library, as
`launch.fork_server` loads it by its path.

Sources: proc(5), prctl(2) and sched_setaffinity(2) of Linux; ps(1), sysctl(3) and getrusage(2) of
macOS.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "BINDS",
    "COMPLETE",
    "SPARE_SIGNAL",
    "Stat",
    "adopt_descendants",
    "age",
    "arguments",
    "bind",
    "boot",
    "cgroups",
    "children",
    "closes_at_exec",
    "connections",
    "cores",
    "descriptors",
    "end_with",
    "ended",
    "environment",
    "family",
    "interface_address",
    "ipv6_table",
    "kernel_function",
    "main_thread",
    "meminfo",
    "name",
    "namespace",
    "path_of",
    "peak_memory",
    "private_memory",
    "processor",
    "shared_folder",
    "show",
    "start_time",
    "started",
    "stat",
    "stats",
    "threads",
    "transferred",
    "uptime",
    "wait_for_signal",
    "waits",
]

# Whether Linux's own answers are there: each function then has an exact answer.
COMPLETE = os.path.exists("/proc/self/stat")
# Whether a process can be bound to cores.
BINDS = hasattr(os, "sched_setaffinity")
# A signal that neither Python nor the C library (32, 33 and below SIGRTMIN) nor torch (USR2) uses.
SPARE_SIGNAL: int = (
    signal.SIGRTMIN + 10
    if hasattr(signal, "SIGRTMIN")
    else getattr(signal, "SIGEMT", signal.SIGIO)  # macOS has no realtime signals
)

# Not each kernel is built with it (CONFIG_PROC_CHILDREN).
_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
_SECONDS_BETWEEN_SIGNALS = 0.05

# Source: linux/prctl.h. The fields of `struct prctl_mm_map` that are in /proc/self/stat, by their
# numbers in proc(5); -1 is the end of the heap, and 0 the address of the arguments or variables.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_FIELDS = (26, 27, 45, 46, 47, -1, 28, 0, 0, 0, 0)

# The request for an interface's IPv4 address. Sources: linux/sockios.h, sys/sockio.h of macOS.
_SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915


# --- processes


class Stat(NamedTuple):
    """Facts about a process or a thread.

    Attributes:
        state: state letter, such as R, S, D or T; empty if the process has ended.
        parent: process id of the parent.
        started: start time in clock ticks since the boot, or in seconds since the epoch where there
            is no /proc; with the process id, it identifies the process.
        seconds: processor time in seconds, with that of children for which it has waited.
    """

    state: str
    parent: int
    started: int
    seconds: float = 0.0


def stat(pid: int) -> Stat:
    """Return facts about a process.

    Raises:
        OSError: the system does not show the process.
    """
    return _stat(f"{pid}") if COMPLETE else _stat_of_ps(pid)


def stats(pids: Collection[int]) -> list[Stat]:
    """Return facts about processes, without those that have ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(stat(pid))
    return found


def threads(pid: int) -> list[Stat]:
    """Return facts about the threads of a process; none if it has ended, or without /proc."""
    found = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            found.append(_stat(f"{pid}/task/{task}"))
    return found


def main_thread(pid: int) -> Stat:
    """Return facts about the main thread of a process, or about the process without /proc.

    Raises:
        OSError: the system does not show the process.
    """
    return _stat(f"{pid}/task/{pid}") if COMPLETE else stat(pid)


def children(pid: int) -> list[int]:
    """Return the ids of the children of a process; none if it has ended."""
    if _LISTS_CHILDREN:
        listed = (_text(f"{pid}/task/{task}/children").split() for task in _tasks(pid))
        return [int(one) for words in listed for one in words]
    return [child for child, parent in _parents() if parent == pid]


def family(pid: int) -> list[int]:
    """Return the ids of a process and of its children, and theirs."""
    found = [pid]
    parents = [] if _LISTS_CHILDREN else list(_parents())
    for one in found:
        found += children(one) if _LISTS_CHILDREN else [c for c, parent in parents if parent == one]
    return found


def private_memory(pid: int) -> int:
    """Return the bytes of a process in memory that are of no file; 0 if it has ended.

    Pages that a forked process still shares with its parent are counted; without /proc, also those
    of files.
    """
    if not COMPLETE:
        return int(_ps(pid, "rss") or 0) * 1024
    pages = _text(f"{pid}/statm").split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def peak_memory() -> int:
    """Return the most bytes that this process has had in memory."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def started(pid: int) -> int | None:
    """Return `Stat.started`; 0 if the process has ended, None if the system does not show it."""
    try:
        found = stat(pid)
    except OSError:
        return None
    return found.started if found.state else 0


def start_time(pid: int) -> int | None:
    """Return when a process was started, in seconds since the epoch; None if it is not known."""
    since = started(pid)
    if not COMPLETE or not since:
        return since or None
    boot_time = re.search(r"^btime ([0-9]+)", _text("stat"), re.MULTILINE)
    return int(boot_time[1]) + since // os.sysconf("SC_CLK_TCK") if boot_time else None


def age(pid: int) -> float | None:
    """Return the seconds since the start of a process, to 0.01; None if it is not known.

    Without /proc, to a second.
    """
    since = started(pid)
    if not since:
        return None
    return uptime() - since / os.sysconf("SC_CLK_TCK") if COMPLETE else time.time() - since


def environment(pid: int) -> dict[str, str] | None:
    """Return the environment with which a process was started; None if it is not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            block = file.read()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def name(pid: int) -> str:
    """Return the name of a process, which Linux cuts at 15 bytes; empty if it is not known."""
    return _text(f"{pid}/comm") if COMPLETE else os.path.basename(_ps(pid, "comm"))


def arguments(pid: int) -> list[str]:
    """Return the command line of a process; without /proc, divided at each space."""
    return _text(f"{pid}/cmdline").split("\0") if COMPLETE else _ps(pid, "command").split(" ")


def kernel_function(pid: int) -> str:
    """Return the function of the kernel in which a process waits; empty if it is not known."""
    found = _text(f"{pid}/wchan")
    return "" if found == "0" else found  # for a process that waits nowhere


def waits(pid: int) -> int:
    """Return how often the main thread of a process has waited; 0 if it is not known."""
    found = re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", _text(f"{pid}/status"))
    return int(found[1]) if found else 0


def transferred(pids: Collection[int]) -> int:
    """Return the bytes that processes have read and written; 0 if it is not known."""
    counted = "\n".join(_text(f"{pid}/io") for pid in pids)
    return sum(map(int, re.findall(r"^[rw]char: (\d+)", counted, re.MULTILINE)))


def namespace() -> int:
    """Return the number of this process's pid namespace; 0 if the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; without Linux, do nothing."""
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(0)


def adopt_descendants() -> None:
    """Become the parent of all processes below this one that lose theirs; only on Linux."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ended(pid: int) -> tuple[bool, int] | None:
    """Return whether a child has exited, or was killed, and its code or signal; None if it runs.

    It keeps its id until this process waits for it; on macOS only with Python 3.13 or newer.
    """
    if hasattr(os, "waitid"):
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return (found.si_code == os.CLD_EXITED, found.si_status) if found else None
    done, status = os.waitpid(pid, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if done else 0
    return (code >= 0, abs(code)) if done else None


def show(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Let `ps` and others show a command and an environment as those of this process.

    Source: PR_SET_MM in prctl(2); without CONFIG_CHECKPOINT_RESTORE the call fails.

    Returns:
        Whether they do.
    """
    import ctypes

    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={environ[name]}") + b"\0" for name in environ)
    # The kernel reads them as long as the process lives.
    memory = ctypes.create_string_buffer(words + variables)
    show.memory = memory  # type: ignore[attr-defined]
    begins = ctypes.addressof(memory)
    places = iter((begins, begins + len(words), begins + len(words), begins + len(memory) - 1))
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    values = [
        next(places) if number == 0 else libc.sbrk(0) if number < 0 else int(fields[number - 3])
        for number in _FIELDS
    ]
    record = (ctypes.c_uint64 * 13)(*values, 0, 0xFFFFFFFF << 32)  # no auxv, no other executable
    return _prctl(_PR_SET_MM, _PR_SET_MM_MAP, record, ctypes.sizeof(record), 0)


def wait_for_signal(number: int, seconds: float) -> int | None:
    """Wait for a blocked signal, up to some seconds.

    Returns:
        The process id of the sender, 0 for one outside of this pid namespace, -1 on macOS, which
        does not tell it; None if no signal came.
    """
    if hasattr(signal, "sigtimedwait"):
        found = signal.sigtimedwait({number}, seconds)
        return found.si_pid if found else None
    end = time.monotonic() + seconds
    while number not in signal.sigpending():
        if time.monotonic() >= end:
            return None
        time.sleep(min(_SECONDS_BETWEEN_SIGNALS, seconds))
    signal.sigwait({number})
    return -1


def _stat(path: str) -> Stat:
    # The name, in parentheses, may contain any characters. It is cut at 15 bytes.
    with open(f"/proc/{path}/stat", errors="replace") as file:
        content = file.read()
    state, parent, *others = content.rpartition(")")[2].split()
    seconds = sum(map(int, others[9:13])) / os.sysconf("SC_CLK_TCK")
    return Stat("" if state in "ZX" else state, int(parent), int(others[17]), seconds)


def _stat_of_ps(pid: int) -> Stat:
    words = _ps(pid, "state", "ppid", "time", "lstart").split()
    if not words:
        raise ProcessLookupError(pid)
    state, parent, used, *since = words
    letter = {"U": "D", "I": "S", "Z": ""}.get(state[0], state[0])
    days, _, clock = used.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    when = time.mktime(time.strptime(" ".join(since), "%a %b %d %H:%M:%S %Y"))
    return Stat(letter, int(parent), int(when), seconds + 86400 * int(days or 0))


def _ps(pid: int, *fields: str) -> str:
    """Return what ps(1) shows of a process; empty if it has ended."""
    # BSD takes all that follows the first "=" for a title.
    options = [word for field in fields for word in ("-o", f"{field}=")]
    return _output("ps", "-ww", *options, "-p", str(pid)).strip()


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the id of each process, and that of its parent."""
    if COMPLETE:
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                yield int(entry), _stat(entry).parent
        return
    for line in _output("ps", "-A", "-o", "pid=", "-o", "ppid=").splitlines():
        pid, parent = line.split()
        yield int(pid), int(parent)


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _prctl(*values: Any) -> bool:
    """Call prctl(2); return whether it is there and succeeds."""
    import ctypes

    try:
        function = ctypes.CDLL(None).prctl
    except AttributeError:
        return False
    return not function(*values)


# --- cores and memory


def cores() -> set[int]:
    """Return the cores that this process may use, or all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def bind(chosen: Collection[int]) -> None:
    """Bind this process to cores, where the system can."""
    if BINDS:
        os.sched_setaffinity(0, chosen)


def processor() -> str:
    """Return the name of the processor; empty if it is not known."""
    found = re.search(r"^model name\s*:\s*(.*)", _text("cpuinfo"), re.MULTILINE)
    return found[1] if found else _output("sysctl", "-n", "machdep.cpu.brand_string").strip()


def meminfo(field: str, root: "str | os.PathLike[str]" = "/") -> int | None:
    """Return an amount of /proc/meminfo in bytes; None if it is not known.

    Args:
        field: name of the amount, such as MemAvailable.
        root: folder that contains /proc.
    """
    for line in _text("meminfo", root).splitlines():
        word, _, value = line.partition(":")
        if word == field:
            return int(value.split()[0]) * 1024
    if field == "MemTotal" and not COMPLETE:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def cgroups(root: "str | os.PathLike[str]" = "/") -> list[str]:
    """Return the lines for this process's cgroups; none without them.

    Args:
        root: folder that contains /proc.
    """
    return _text("self/cgroup", root).splitlines()


# --- time


def uptime() -> float:
    """Return the seconds since the boot, with those in which the machine slept."""
    # Python's name for the clock of macOS, which counts them.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot() -> str:
    """Return a name of this boot of the machine; empty if it has none."""
    if COMPLETE:
        return _text("sys/kernel/random/boot_id")
    # The first process has started with the machine.
    return _output("sysctl", "-n", "kern.bootsessionuuid").strip() or str(started(1) or "")


# --- files and networks


def shared_folder() -> str:
    """Return the folder for memory that processes share, else that for temporary files."""
    if os.path.isdir("/dev/shm"):  # noqa: S108 — callers check what they find there
        return "/dev/shm"  # noqa: S108
    import tempfile

    return tempfile.gettempdir()


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return the open files of a process by number; none if they are not known."""
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed by now
                found[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def connections(pids: Collection[int]) -> set[tuple[str, str]]:
    """Return the ends of the TCP connections of processes: address and port, its own end first.

    Empty where the system does not tell.
    """
    files = (file for pid in pids for file in descriptors(pid).values())
    sockets = {file[8:-1] for file in files if file.startswith("socket:[")}
    if not sockets:
        return set()
    tables = (_text(f"/proc/net/{name}").splitlines()[1:] for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {(line[1], line[2]) for line in lines if line[3] == "01" and line[9] in sockets}


def closes_at_exec(pid: int, number: int) -> bool | None:
    """Return whether a process's file closes in a new program; None if it is not known."""
    flags = re.search(r"flags:\s+([0-7]+)", _text(f"{pid}/fdinfo/{number}"))
    return None if flags is None else bool(int(flags[1], 8) & os.O_CLOEXEC)


def path_of(descriptor: int) -> str:
    """Return a path by which other processes can open a file of this one; only on Linux."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def ipv6_table() -> str:
    """Return Linux's table of IPv6 addresses; empty without one."""
    return _text("net/if_inet6")


def interface_address(interface: str) -> str | None:
    """Return the IPv4 address of a network interface; None if it has none."""
    import fcntl

    request = interface.encode()[:15].ljust(256, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _text(path: str, root: "str | os.PathLike[str]" = "/") -> str:
    """Return the content of a file below /proc; empty if it is not readable."""
    try:
        with open(os.path.join(root, "proc", path), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _output(*command: str) -> str:
    """Return what a program prints; empty if it fails."""
    import subprocess

    environ = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout
