"""Ranks that are copies of a process which has imported torch; see `fork_server`.

What a rank sees is what a new interpreter shows. docs/launching.md has a table of what differs.

It needs only the standard library. `fork_server` imports it by its path.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import runpy
import sys
import threading
import types
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader, all_suffixes
from typing import Any

__all__ = ["WarmProcess", "run_program"]

# Devices that a process with a context on an accelerator has open.
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg", "/dev/accel", "/dev/hl")


class WarmProcess:
    """This process, once it has imported modules for the ranks.

    Args:
        modules: modules to import. One that cannot be imported is left to the script, which shows
            the error.
        imported: modules that Python has imported before the first line of a script.
        main: what Python sets in `__main__`.
        system: the module `hpctrain.cluster.system`.
    """

    def __init__(
        self,
        modules: Sequence[str],
        imported: Collection[str],
        main: Mapping[str, Any],
        system: Any,
    ) -> None:
        self._main, self._system = main, system
        environ = dict(os.environ)
        # Warnings of the imports: each rank would print them.
        self._printed = [os.memfd_create(f"hpctrain-{number}") for number in (1, 2)]
        for number, file in enumerate(self._printed, 1):
            os.dup2(file, number)
        for name in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self._changed = {
            name: (environ.get(name), value)
            for name, value in os.environ.items()
            if environ.get(name) != value
        }
        self._imported = {
            name: getattr(module, "__file__", None) or ""
            for name, module in list(sys.modules.items())
            if not ("." in name or name in imported or name in sys.builtin_module_names)
        }
        # A rank would write to all pages with objects in the first collection, and so copy them.
        gc.collect()
        gc.freeze()
        # The threads of OpenBLAS, which NumPy and SciPy bring, end before a fork. Those that are
        # left after it would be missing in a rank.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def obstacle(self, command: Sequence[str], folder: str | None) -> str:
        """Return the reason why a rank cannot be a copy of this process; empty if it can."""
        if threading.active_count() > 1 or len(self._system.threads(os.getpid())) > 1:
            return "an import has started a thread"
        for file in self._system.descriptors().values():
            if file.startswith(_ACCELERATORS):
                return f"an import has opened {file}"
        place = _first_of_path(command, folder or os.getcwd())
        try:
            entries = list(os.scandir(place))
        except OSError:
            return f"{place} cannot be read"
        for entry in entries:
            name = entry.name.partition(".")[0]
            is_module = entry.name.endswith(tuple(all_suffixes()))
            is_package = os.path.exists(os.path.join(entry.path, "__init__.py"))
            if name in self._imported and (is_module or is_package):
                file = os.path.realpath(self._imported[name])
                if not file.startswith(os.path.realpath(entry.path)):
                    return f"{entry.path} has the name of a module that is imported before"
        return ""

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run a script or module in a copy of this process, as Python does.

        Args:
            command: Python, perhaps -P, and the script or -m MODULE, with arguments.
            environ: environment of the rank.
        """
        for number, file in enumerate(self._printed, 1):
            _copy(file, number)
            os.close(file)
        environ = {**environ}
        for name, (before, value) in self._changed.items():
            if environ.get(name) == before:
                environ[name] = value
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        if not self._system.show(command, environ):
            # Then a process that this one starts cannot see what it has inherited.
            os.environ["HPCTRAIN_BEGAN"] = json.dumps(environ)
        _seed()
        if "hpctrain.process.read_once" in sys.modules:
            vars(sys.modules["hpctrain.process.read_once"])["at_fork"] = environ
        sys.orig_argv = list(command)
        run_program(list(command[1:]), self._main, sys.flags.safe_path)


def run_program(words: list[str], main: Mapping[str, Any], safe_path: bool) -> None:
    """Run a script, or the module or text after -m or -c, as Python does.

    Args:
        words: perhaps -P, the script or -m MODULE or -c TEXT, and arguments.
        main: what Python sets in `__main__`.
        safe_path: whether no folder is put in front of `sys.path`.
    """
    words = words[1:] if words[0] == "-P" else words
    first = _first_of_path(["", *words], os.getcwd())
    if not safe_path:
        sys.path.insert(0, "" if words[0] == "-c" else first)
    module = types.ModuleType("__main__")
    vars(module).clear()
    vars(module).update(main)
    sys.modules["__main__"] = module
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec", dont_inherit=True), vars(module))  # noqa: S102
        else:
            sys.argv = words
            path = os.path.join(os.getcwd(), words[0])
            loader = SourceFileLoader("__main__", path)
            vars(module).update(__file__=path, __loader__=loader, __doc__=None)
            code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
            exec(code, vars(module))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        _hide_frames(error)
        raise


def _hide_frames(error: BaseException) -> None:
    """Let Python show an error without the functions of this file."""
    hook, trace = sys.excepthook, error.__traceback__ and error.__traceback__.tb_next

    def show(kind: type[BaseException], value: BaseException, _: object) -> None:
        value.__traceback__ = trace
        hook(kind, value, trace)

    sys.excepthook = show


def _first_of_path(command: Sequence[str], folder: str) -> str:
    """Return the first folder of `sys.path`: that of the script, or of -m and -c."""
    words = [word for word in command[1:3] if word != "-P"]
    if words[0] in ("-m", "-c"):
        return folder
    return os.path.dirname(os.path.realpath(os.path.join(folder, words[0])))


def _seed() -> None:
    """Seed the generators from the system, as a new process does; Python's `random` has done it."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _copy(file: int, target: int) -> None:
    for place in itertools.count(0, 1 << 16):
        data = os.pread(file, 1 << 16, place)
        if not data:
            return
        os.write(target, data)
