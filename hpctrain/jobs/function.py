"""Work of each rank of a submitted job: a function, or a script in its place.

submitit sends a `SubmititRank` to the ranks as a pickle, calls it there, and sends its result back.
Source for its steps before and after the call: submitit/core/_submit.py, submitit 1.5.4.
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

__all__ = ["Function", "Script", "SubmititRank", "pack", "run"]

# Signals that submitit handles: SIGCONT, SIGTERM, and the one that it requests from Slurm.
_SUBMITIT_SIGNALS = (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Function:
    """Function and its arguments, which may come from a notebook.

    Attributes:
        call: function, arguments and keyword arguments, pickled by cloudpickle.
        path: `sys.path` of the submitting process.
        argv: `sys.argv` of the submitting process.
    """

    call: bytes
    path: tuple[str, ...]
    argv: tuple[str, ...]

    def __call__(self) -> Any:
        """Call the function and return its result."""
        sys.path += [entry for entry in self.path if entry not in sys.path]
        sys.argv[:] = self.argv
        # The user's own pickle, from a folder in which no other user can write.
        function, args, kwargs = pickle.loads(self.call)  # noqa: S301
        if getattr(function, "__module__", None) == "__main__":
            # pickle looks up the classes of a notebook in `__main__`.
            names = vars(sys.modules["__main__"])
            names.update({**getattr(function, "__globals__", {}), **names})
        return function(*args, **kwargs)


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Function:
    """Pickle a function and its arguments for the ranks.

    Raises:
        UsageError: the function or an argument cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # __reduce__ and __getstate__ may raise any exception
        raise UsageError(
            "HT814",
            f"{getattr(function, '__qualname__', function)} and its arguments cannot be sent to "
            f"the ranks: {type(error).__name__}: {error}",
            "a function, globals that it uses, and arguments that pickle can serialize",
            "create open files, locks, generators and connections inside the function",
        ) from None
    return Function(call, tuple(os.fspath(entry) for entry in sys.path), tuple(sys.argv))


@dataclass(frozen=True, slots=True)
class Script:
    """Script or module that is run as `python` runs it, in the process of the rank.

    Attributes:
        name: path of a file; with `module`, a dotted name.
        module: whether `name` is a module.
        arguments: command-line arguments of the script.
    """

    name: str
    module: bool
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Run the script as `__main__`."""
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
class SubmititRank:
    """Adapter that turns a process of submitit into an ordinary rank, and runs the work in it.

    Attributes:
        work: function or script to run.
        environ: variables to set before the work.
        warned: signal that announces the end of the time, if it is sent to this process; it does
            not end work without a session.
    """

    work: Function | Script
    environ: Mapping[str, str]
    warned: int | None = None

    def __call__(self) -> Any:
        """Prepare the process, and then run the work as `run` does."""
        _restore_signals(self.warned)
        report_uncaught()
        _remove_last_result()
        # submitit's last message in the log would only report that the work has ended.
        logging.getLogger("submitit").setLevel(logging.WARNING)
        os.environ.update(self.environ)
        _redirect_output()
        return run(self.work)


def run(work: Function | Script) -> Any:
    """Run the work and return its result; None if it exits by `sys.exit()`.

    Raises:
        Stopped: the work was stopped at a safe point.
        HpctrainError: the work exited with another code than 0.
    """
    try:
        return work()
    except Stopped as stop:
        if not stop.together:  # else the run has reported it
            sys.stderr.write(f"hpctrain: stopped: {stop.reason}\n")
        raise
    except SystemExit as system_exit:
        if system_exit.code in (None, 0):
            return None
        raise _exit_error(system_exit) from system_exit


def _restore_signals(warned: int | None) -> None:
    """Undo submitit's signal handlers: the batch script requeues, and signals act as usual.

    The handlers would keep SIGTERM from work without a session, and treat USR2 as the end of the
    job's time.
    """
    for number in _SUBMITIT_SIGNALS:
        handler = getattr(signal.getsignal(number), "__self__", None)
        if type(handler).__module__.startswith("submitit."):
            signal.signal(number, _ignore_signal if number == warned else signal.SIG_DFL)


def _ignore_signal(number: int, frame: object) -> None:
    """Ignore a signal; unlike SIG_IGN, a session replaces this handler."""


def _remove_last_result() -> None:
    """Remove the result of this rank from before a requeue, also an incomplete one."""
    import submitit

    result = submitit.JobEnvironment().paths.result_pickle
    for path in (result, result.with_suffix(f"{result.suffix}.save_tmp")):
        path.unlink(missing_ok=True)


def _redirect_output() -> None:
    """Append all further output of this rank to its own file."""
    rank = launchers.detect().rank
    path = log_of(Path(os.environ["SUBMITIT_FOLDER"]), rank)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _exit_error(system_exit: SystemExit) -> HpctrainError:
    """Return the error for sys.exit(3) or sys.exit("why")."""
    code = system_exit.code if isinstance(system_exit.code, int) else 1
    text = f": {system_exit.code}" if not isinstance(system_exit.code, int) else ""
    error = HpctrainError("HT822", f"the script exited with code {code}{text}")
    error.exit_code = code
    return error
