"""`hpctrain.spawn`: run a function on several ranks, from scripts and notebooks."""

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpctrain.cluster import launchers
from hpctrain.errors import HpctrainError, UsageError, report_uncaught
from hpctrain.launch import rank_environment, supervisor, warm_imports
from hpctrain.launch.end import End
from hpctrain.process import calls

__all__ = ["run_rank", "spawn"]

T = TypeVar("T")

# With -c, `__main__` in a rank is an empty module, so the script is not imported a second time.
_RANK = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from hpctrain.launch import spawning; spawning.run_rank(sys.argv.pop(1))"
)


def spawn(
    function: Callable[..., T],
    nproc: int | Literal["auto"] = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run a function on several ranks of this machine, each in a separate process.

    The processes are new interpreters, or copies of one that has only imported torch (CUDA and
    OpenMP do not survive a fork of this process). They have the same working directory, `sys.path`,
    `sys.argv` and environment. cloudpickle sends the function and its
    arguments, so they may be defined in a notebook or at a script's top level, and
    `if __name__ == "__main__"` is not needed. In the function, `hpctrain.Session()` and
    `hpctrain.detect()` return the rank. Each output line begins with the number of its rank. The
    ranks and their child processes end with this process.

    Args:
        function: function that every rank calls.
        nproc: number of ranks; `"auto"` is one for each GPU, or one if there is no GPU.
        args: positional arguments of the function, a tuple or list.
        kwargs: keyword arguments of the function.

    Returns:
        Results of the function, by rank.

    Raises:
        UsageError: wrong arguments; an object cannot be pickled; the call is inside of a rank; or a
            rank ended with exit code 2, as after a UsageError of its own.
        HpctrainError: a rank failed; the text has its number and last lines. `exit_code` is that of
            rank 0's exit status file, if there is one, else 1. As in a Session, an error that is
            not caught ends the process with its exit code and without a traceback.
        KeyboardInterrupt: Ctrl-C in the main thread; the ranks have received it and have ended.
    """
    report_uncaught()
    _check(function, nproc, args)
    count = nproc if nproc != "auto" else max(len(rank_environment.gpus_of(os.environ)), 1)
    _refuse_inside_of_ranks()
    env = dict(os.environ)
    environs = rank_environment.environs((count,), env, "hpctrain", (), None)
    rank_environment.print_threads(env, count)
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as name:
        folder = Path(name)
        call = calls.pack(function, args, kwargs or {}, "HT216.call")
        # A rank needs the path before it can read the call.
        place = [os.fspath(entry) for entry in sys.path], sys.argv
        (folder / "call.pickle").write_bytes(pickle.dumps((*place, call)))
        package = str(Path(launchers.__file__).parents[3])
        command = [sys.executable, "-c", _RANK, package, name]
        imports = warm_imports.of_function(list(environs.values()))
        end = supervisor.run(command, environs, folder, labelled=count > 1, imports=imports)
        failure: HpctrainError | None = None
        try:
            results = _results(folder, end, count)
        except HpctrainError as error:
            failure = error
    _interrupt(end)  # after the folder is removed, because it may end this process
    if failure is not None:
        raise failure
    return results


def _check(function: object, nproc: object, args: object) -> None:
    is_number = isinstance(nproc, int) and not isinstance(nproc, bool) and nproc > 0
    if not callable(function):
        raise UsageError("HT214.not-a-function", function=function)
    if not isinstance(args, (tuple, list)):
        raise UsageError("HT214.args-not-a-list", args_type=type(args).__name__)
    if not is_number and nproc != "auto":
        raise UsageError("HT214.nproc-invalid", nproc=nproc)


def _refuse_inside_of_ranks() -> None:
    """Raise an error inside of a rank: a rank that starts ranks on import would never end."""
    try:
        world = launchers.detect()
    except UsageError:
        return  # contradictory variables, which the ranks do not get
    if world.launcher == "hpctrain" or world.world_size > 1:
        raise UsageError("HT215.spawn-in-rank", world=world)


def _interrupt(end: End) -> None:
    """Handle the signal that was forwarded to the ranks, after the ranks have ended."""
    if end.signal is None:
        return
    if end.signal == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(end.signal)


def _results(folder: Path, end: End, count: int) -> list[Any]:
    """Return the results of the ranks.

    Raises:
        HpctrainError: a rank has failed, or ended before the function returned.
    """
    results = [folder / f"result-{rank}" for rank in range(count)]
    missing = [number for number, path in enumerate(results) if not path.exists()]
    if end.rank is None and not missing:
        # Only this user can write to the folder.
        return [pickle.loads(path.read_bytes()) for path in results]  # noqa: S301
    code, reason = end.recorded or (0, "")
    wrong_use = UsageError.exit_code in (code or end.code, end.rank is not None and end.code)
    kind = UsageError if wrong_use else HpctrainError
    if end.rank is not None:
        error = kind("HT217.rank-failed", rank=end.rank, ranks=count, end=end.text)
    elif end.recorded:
        error = kind("HT217.rank-ended-with-reason", rank=missing[0], ranks=count, reason=reason)
    else:
        error = kind("HT217.rank-ended", rank=missing[0], ranks=count)
    if code and not wrong_use:
        error.exit_code = code
    raise error


def run_rank(name: str) -> None:
    """Call the function that `spawn` has written to a folder, and write its result there.

    Raises:
        UsageError: the result cannot be pickled.
        Exception: any exception of the function.
    """
    report_uncaught()
    folder = Path(name)
    # Only this user can write to the folder.
    path, arguments, call = pickle.loads((folder / "call.pickle").read_bytes())  # noqa: S301
    sys.path[:], sys.argv[:] = path, arguments
    rank = launchers.detect().rank
    result = calls.make(call)
    data = calls.pickled(result, "HT216.result", rank=rank, result_type=type(result).__name__)
    file = folder / f"result-{rank}"
    file.with_suffix(".new").write_bytes(data)
    os.replace(file.with_suffix(".new"), file)
