"""Work of each rank of a job submitted from Python.

submitit sends a `RankWork` to the ranks as a pickle, calls it there, and sends its result back.
Source for its steps before and after the call: submitit/core/_submit.py, submitit 1.5.4.
"""

import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, report_uncaught
from hpctrain.process import calls
from hpctrain.training.preemption import Stopped

__all__ = ["RankWork", "pack", "run_script"]

# Signals that submitit handles: SIGCONT, SIGTERM, and the one that it requests from Slurm.
_SUBMITIT_SIGNALS = (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class RankWork:
    """Function and its arguments, which may come from a notebook, for a process of submitit.

    Attributes:
        call: function, arguments and keyword arguments, as `calls.pack` returns them.
        path: `sys.path` of the submitting process.
        argv: `sys.argv` of the submitting process.
    """

    call: bytes
    path: tuple[str, ...]
    argv: tuple[str, ...]

    def __call__(self) -> Any:
        """Call the function and return its result; None if it exits by `sys.exit()`.

        Raises:
            Stopped: the work was stopped at a safe point.
            HpctrainError: the work exited with another code than 0.
        """
        _make_ordinary_rank()
        sys.path += [entry for entry in self.path if entry not in sys.path]
        sys.argv[:] = self.argv
        try:
            # From a folder in which no other user can write.
            return calls.make(self.call)
        except Stopped as stop:
            if not stop.together:  # else the run has reported it
                sys.stderr.write(f"hpctrain: stopped: {stop.reason}\n")
            raise
        except SystemExit as system_exit:
            if system_exit.code in (None, 0):
                return None
            raise _exit_error(system_exit) from system_exit


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RankWork:
    """Pickle a function and its arguments for the ranks.

    Raises:
        UsageError: the function or an argument cannot be pickled.
    """
    call = calls.pack(function, args, kwargs, "HT814.cannot-pickle")
    return RankWork(call, tuple(os.fspath(entry) for entry in sys.path), tuple(sys.argv))


def run_script(path: str, *arguments: object) -> None:
    """Run a script as `__main__`, as `python` does, in the process of the rank."""
    sys.argv[:] = [path, *map(str, arguments)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _make_ordinary_rank() -> None:
    """Undo what submitit has done to this process, and remove the result of an earlier start.

    Its signal handlers would keep SIGTERM from work without a session, and treat USR2 as the end
    of the job's time. The batch script requeues.
    """
    import submitit

    for number in _SUBMITIT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    report_uncaught()
    # submitit's last message in the log would only report that the work has ended.
    logging.getLogger("submitit").setLevel(logging.WARNING)
    paths = submitit.JobEnvironment().paths
    for path in (paths.result_pickle, Path(f"{paths.result_pickle}.save_tmp")):  # also incomplete
        path.unlink(missing_ok=True)
    _redirect_output(paths.stdout)


def _redirect_output(path: Path) -> None:
    """Append all further output of this rank to its own file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _exit_error(system_exit: SystemExit) -> HpctrainError:
    """Return the error for sys.exit(3) or sys.exit("why")."""
    code = system_exit.code
    error = HpctrainError("HT822.script-exited", code=code)
    error.exit_code = code if isinstance(code, int) else 1
    return error
