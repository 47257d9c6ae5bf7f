"""A stand-in for macOS: with this folder on PYTHONPATH, Linux lacks what Python on macOS lacks.

It hides /proc, /sys and /dev/shm from Python, and takes away functions, signals and options that
are only on Linux. New processes start by spawn. Programs in C, such as torch, still see all of it.
"""

import builtins
import ctypes
import io
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import time

_HIDDEN = ("/proc", "/sys", "/dev/shm")
_LACKING = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler"),
        *("pidfd_open", "memfd_create", "eventfd", "waitid", "pipe2", "fdatasync", "getrandom"),
        *("posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "unshare", "setns"),
    ),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
    socket: ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SO_PEERCRED", "AF_NETLINK", "SOCK_CLOEXEC"),
    time: ("CLOCK_BOOTTIME",),
}
_SYMBOLS = ("prctl", "sched_setaffinity", "unshare", "renameat2", "inotify_add_watch")

for module, names in _LACKING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _without(function):
    def wrapped(path=".", *rest, **options):
        is_path = isinstance(path, (str, bytes, os.PathLike))
        if is_path and os.fsdecode(os.fspath(path)).startswith(_HIDDEN):
            raise FileNotFoundError(2, os.strerror(2), path)
        return function(path, *rest, **options)

    return wrapped


builtins.open = io.open = _without(io.open)
for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
    setattr(os, name, _without(getattr(os, name)))

_symbol = ctypes.CDLL.__getattr__


def _known_symbol(library, name):
    if name in _SYMBOLS:
        raise AttributeError(name)
    return _symbol(library, name)


ctypes.CDLL.__getattr__ = _known_symbol

_start = subprocess.Popen.__init__


def _with_site(process, words, *rest, **options):
    # Python reads this file only with its site: in the watchdog's helper and the fork server, too.
    if isinstance(words, list):
        words = [word for number, word in enumerate(words) if word != "-S" or number > 1]
    _start(process, words, *rest, **options)


subprocess.Popen.__init__ = _with_site
multiprocessing.set_start_method("spawn", force=True)
