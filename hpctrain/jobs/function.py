"""What each rank of a submitted job runs: a function, or a script in its place.

submitit carries a `Rank` to the ranks as a pickle, calls it there, and carries back what it
returns. Source of what it does before and after: submitit/core/_submit.py, submitit 1.5.4.
"""

import logging
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import launchers
from hpctrain.errors import HpctrainError, UsageError, report_uncaught
from hpctrain.jobs.job_store import log_of
from hpctrain.training.preemption import Stopped

__all__ = ["Function", "Rank", "Script", "pack", "run"]

# The signals that submitit's handlers take: SIGCONT, SIGTERM, and the one that it asks Slurm for.
_TAKEN = (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Function:
    """A function and its arguments, which may come from a notebook.

    Attributes:
        call: function, arguments and keyword arguments, pickled by cloudpickle.
        path: the `sys.path` of who submitted it.
        argv: the `sys.argv` of who submitted it.
    """

    call: bytes
    path: tuple[str, ...]
    argv: tuple[str, ...]

    def __call__(self) -> Any:
        """What the function returns."""
        sys.path += [entry for entry in self.path if entry not in sys.path]
        sys.argv[:] = self.argv
        # The user's own pickle, from a folder where nobody else can write.
        function, args, kwargs = pickle.loads(self.call)  # noqa: S301
        if getattr(function, "__module__", None) == "__main__":
            # There pickle seeks the classes of a notebook.
            names = vars(sys.modules["__main__"])
            names.update({**getattr(function, "__globals__", {}), **names})
        return function(*args, **kwargs)


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Function:
    """A function and its arguments, to be sent.

    Raises:
        UsageError: something of them cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # what __reduce__ and __getstate__ of anything may raise
        raise UsageError(
            f"{getattr(function, '__qualname__', function)} and its arguments cannot be sent to "
            f"the ranks: {type(error).__name__}: {error}",
            "a function, globals that it uses, and arguments that pickle takes",
            "make open files, locks, generators and connections inside of the function",
        ) from None
    return Function(call, tuple(os.fspath(one) for one in sys.path), tuple(sys.argv))


@dataclass(frozen=True, slots=True)
class Script:
    """A script or module, run as `python` runs it, in the process of the rank.

    Attributes:
        name: the path of a file, or with `module` a dotted name.
        module: whether it is one.
        arguments: its own.
    """

    name: str
    module: bool
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Run it as `__main__`."""
        argv, path = list(sys.argv), list(sys.path)
        sys.argv[:] = [self.name, *self.arguments]
        try:
            if self.module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(self.name).parent))
                runpy.run_path(self.name, run_name="__main__")
        finally:
            sys.argv[:], sys.path[:] = argv, path


@dataclass(frozen=True, slots=True)
class Rank:
    """Makes a process of submitit's an ordinary rank, and runs the work in it.

    Attributes:
        work: what to run.
        environ: variables that are set before.
        warned: the signal that says that the time is over, where it comes to this process: work
            without a session is not ended by it.
    """

    work: Function | Script
    environ: Mapping[str, str]
    warned: int | None = None

    def __call__(self) -> Any:
        """As `run`."""
        _let_go_of_signals(self.warned)
        report_uncaught()
        _forget_the_last_start()
        # What it says at the end is no more than that this has ended, in the log of the work.
        logging.getLogger("submitit").setLevel(logging.WARNING)
        os.environ.update(self.environ)
        _keep_log()
        return run(self.work)


def run(work: Function | Script) -> Any:
    """What work returns; None where it leaves by `sys.exit()`.

    Raises:
        Stopped: it was stopped at a safe point.
        HpctrainError: it left with another exit code than 0.
    """
    try:
        return work()
    except Stopped as stop:
        if not stop.together:  # else the run has told
            sys.stderr.write(f"hpctrain: stopped: {stop.reason}\n")
        raise
    except SystemExit as left:
        if left.code in (None, 0):
            return None
        raise _failed(left) from left


def _let_go_of_signals(warned: int | None) -> None:
    """Undo submitit's handlers: the batch script requeues, and a signal means what it says.

    They would keep SIGTERM from work that has no session, and call a job's time over at USR2.
    """
    for number in _TAKEN:
        handler = getattr(signal.getsignal(number), "__self__", None)
        if type(handler).__module__.startswith("submitit."):
            signal.signal(number, _go_on if number == warned else signal.SIG_DFL)


def _go_on(number: int, frame: object) -> None:
    """A handler that does nothing; unlike SIG_IGN a session takes its place."""


def _forget_the_last_start() -> None:
    """Remove the result of this rank from before a requeue, also one that was cut off."""
    import submitit

    result = submitit.JobEnvironment().paths.result_pickle
    for path in (result, result.with_suffix(f"{result.suffix}.save_tmp")):
        path.unlink(missing_ok=True)


def _keep_log() -> None:
    """From here on all that this rank prints goes to a file of its own, appended."""
    rank = launchers.detect().rank
    path = log_of(Path(os.environ["SUBMITIT_FOLDER"]), rank)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _failed(left: SystemExit) -> HpctrainError:
    """sys.exit(3), or sys.exit("why")."""
    code = left.code if isinstance(left.code, int) else 1
    said = f": {left.code}" if not isinstance(left.code, int) else ""
    error = HpctrainError(f"the script left with exit code {code}{said}")
    error.exit_code = code
    return error
