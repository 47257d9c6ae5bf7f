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
import sys

from hpctrain.cluster import system
from hpctrain.cluster.env_vars import BEGAN
from hpctrain.launch.forked_rank import run_program

__all__ = ["main"]


def main() -> None:
    """Import the modules, wait, and run the program as Python does."""
    names, *words = sys.argv[1:]
    system.set_oom_score(1000)  # where memory is short, the kernel ends this process first
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
    system.set_oom_score(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    fields = ("__doc__", "__package__", "__loader__", "__spec__")
    fresh = {"__name__": "__main__", **dict.fromkeys(fields), "__builtins__": builtins}
    safe_path = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    run_program(words, fresh, safe_path)


if __name__ == "__main__":
    main()
