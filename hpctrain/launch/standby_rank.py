"""Rank of the next attempt, which waits with its imports done until the attempt begins.

    python -P -m hpctrain.launch.standby_rank MODULES SCRIPT.py ARGS
    python -P -m hpctrain.launch.standby_rank MODULES -m MODULE ARGS

While ranks train, `hpctrain run` starts those of the next attempt. After a failure they begin
without the seconds that Python needs to import torch. A rank begins when it has read a line with
its environment, as JSON, from its standard input; if the input ends without one, it is not needed.
"""

import builtins
import contextlib
import importlib
import json
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader

from hpctrain.cluster.env_vars import BEGAN

__all__ = ["main"]


def main() -> None:
    """Import the modules, wait, and run the program as Python does."""
    names, *words = sys.argv[1:]
    _write_oom_score(1000)  # where memory is short, the kernel ends this process first
    for name in filter(None, names.split(",")):
        with contextlib.suppress(ImportError):  # the program shows the error
            importlib.import_module(name)
    with open(0, "rb", closefd=False) as stream:
        line = stream.read()
    if not line.endswith(b"\n"):
        sys.exit()
    environ = json.loads(line)
    changed = {name: environ[name] for name in environ if os.environ.get(name) != environ[name]}
    os.environ.update(environ, **{BEGAN: json.dumps(changed)})
    _write_oom_score(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _run(words)


def _run(words: list[str]) -> None:
    safe = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    words = words[1:] if words[0] == "-P" else words
    if words[0] == "-m":
        first, sys.argv = os.getcwd(), words[1:]
    else:
        first, sys.argv = os.path.dirname(os.path.realpath(words[0])), words
    if not safe:
        sys.path.insert(0, first)
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        path = os.path.join(os.getcwd(), words[0])
        main = types.ModuleType("__main__")
        main.__file__, main.__builtins__ = path, builtins  # type: ignore[attr-defined]
        main.__loader__ = SourceFileLoader("__main__", path)
        sys.modules["__main__"] = main
        exec(compile(main.__loader__.get_data(path), path, "exec"), vars(main))  # noqa: S102


def _write_oom_score(score: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


if __name__ == "__main__":
    main()
