"""Stop requests: signals, stop files, the end of the job's time.

A signal handler only sets a flag: Python runs no handler while a collective waits, and ranks that
save at different steps make no usable checkpoint. The run reads the flag, reaches consensus with
the other ranks, saves, and raises `Stopped`.
"""

import builtins
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain import rundir
from hpctrain.cluster import env_vars, slurm, system
from hpctrain.cluster.job import Allocation
from hpctrain.errors import exit_codes
from hpctrain.process import signals
from hpctrain.process.logging import logger

__all__ = ["REASONS", "Preemption", "Stopped"]

_TIME_LIMIT, _STOP_FILE = "the end of the job's time", "a signal to the job"
_SUBMITIT = "SUBMITIT_EXECUTOR"
# SIGNALING is the state that Slurm shows for a moment after it has sent a signal.
_GOES_ON = ("RUNNING", "SIGNALING")
_TAKEN = (*signals.STOP, signal.SIGINT)

#: Reasons why a run stops; the ranks exchange one number for each of them.
REASONS = (
    _TIME_LIMIT,
    _STOP_FILE,
    rundir.STOP_REASON,
    *(signal.Signals(number).name for number in _TAKEN),
)


class Stopped(SystemExit):
    """Exit from the script at a safe point, from which a later start continues.

    The exit code is 75. If $HPCTRAIN_EXIT_STATUS_FILE is set, the program that started the ranks
    decides. Then the exit code is 0, as the exit status file has the result; or 128 plus the
    signal, if this rank cannot determine whether all ranks were to stop. (srun and mpirun send
    SIGTERM to the other ranks when one rank fails. If such a job counted as stopped, it would be
    requeued and fail again, without end.)

    Args:
        reason: one line of text for the exit status file.
        env: environment variables, for $HPCTRAIN_EXIT_STATUS_FILE.
        alone: signal that this rank received outside a run; None if all ranks leave now.
    """

    def __init__(self, reason: str, env: Mapping[str, str], alone: int | None = None) -> None:
        code = 0 if alone is None else 128 + alone
        super().__init__(code if env.get(env_vars.EXIT_STATUS_FILE) else exit_codes.STOPPED)
        self.reason = reason
        self.together = alone is None


class Preemption:
    """Stop requests that this rank has received.

    While the session opens, a signal raises `Stopped`, as nothing can be lost yet. After that the
    other ranks would wait for this rank, so a signal stops the next run, at its beginning or at a
    step; outside a run, a second signal raises `Stopped`. SIGINT stops a run like the other
    signals, and a second SIGINT ends it at once. In a notebook or an interactive Python, SIGINT is
    not handled here.

    Args:
        rank: rank of this process; only rank 0 checks stop files and the clock.
        env: environment variables, for $HPCTRAIN_STOP_FILE and $HPCTRAIN_EXIT_STATUS_FILE.
        job: job of the scheduler, for its end time.
        undo: receives the callback that restores the signal handlers.
        handles: whether signals are handled at all.
        clock: returns seconds since the epoch; tests replace it.
    """

    def __init__(
        self,
        rank: int,
        env: Mapping[str, str],
        job: Allocation | None,
        undo: ExitStack,
        handles: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank, self._env, self._process = rank, env, os.getpid()
        self._job, self._clock = job, clock
        self._end = job.end_time if job is not None else None
        self._of_the_start = Path(env[env_vars.STOP_FILE]) if env.get(env_vars.STOP_FILE) else None
        self._of_the_run: list[Path] = []
        self._caught: int | None = None
        self._opened = self._running = self._looked = False
        self._found: dict[int, Any] = {}
        if not handles or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
        for number in signals.STOP if interactive else _TAKEN:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue  # as in a background job of a shell script, which must not react to Ctrl-C
            self._found[number] = signal.signal(number, self._handle)
        undo.callback(self._put_back)

    def opened(self) -> None:
        """Record that the ranks are connected."""
        self._opened = True

    def begin(self, directory: rundir.RunDirectory) -> None:
        """Treat a signal as a stop request from now on, until `end`.

        Args:
            directory: run directory; a file `stop` in it is a stop request, too, and for a run with
                a name also one in the folder around it. One from before this launch is removed.
        """
        self._of_the_run = directory.stops() if self._rank == 0 else []
        self._ignore_old_files()
        self._running = True
        if self._rank == 0 and self._end is None and self._job and self._job.scheduler == "slurm":
            # Older Slurm, such as 22.05, does not give its jobs the end time. A thread asks for it,
            # because a busy Slurm answers slowly.
            threading.Thread(target=self._ask, name="end of the job", daemon=True).start()

    def _ignore_old_files(self) -> None:
        """Remove the stop files from before this launch: they were for an earlier one."""
        launched = float(self._env.get(env_vars.LAUNCHED) or system.start_time(os.getpid()) or 0)
        for file in self._of_the_run:
            with contextlib.suppress(OSError):
                if file.stat().st_mtime < int(launched):
                    file.unlink()
                    logger.warning("%s is older than this launch, and was removed", file)

    def end(self) -> None:
        """Record the end of the run; its stop file is no longer checked."""
        self._running = False
        self._of_the_run = []

    def close(self) -> None:
        """Record the end of the session; a signal is then too late to stop a run."""
        self._running = True

    def asked(self, save_margin: float) -> str | None:
        """Return one of `REASONS`, or None; checks files, so do not call it at every step.

        Args:
            save_margin: seconds before the end of the job's time at which the run has to stop.
        """
        if self._caught is not None:
            self._look_at_the_clock(signal.Signals(self._caught).name, save_margin)
            return signal.Signals(self._caught).name
        if self._rank > 0:
            return None
        # os.path.exists returns False if the file system has a temporary error.
        for file, reason in (
            (self._of_the_start, _STOP_FILE),
            *((file, rundir.STOP_REASON) for file in self._of_the_run),
        ):
            if file and os.path.exists(file):
                self._look_at_the_clock(reason, save_margin)
                return reason
        if self._end is not None and self._clock() + save_margin >= self._end:
            return _TIME_LIMIT
        return None

    def obeyed(self, directory: rundir.RunDirectory) -> None:
        """Remove the stop files after the save, as they would also stop the next start."""
        if self._rank == 0:
            try:
                for file in directory.stops():
                    file.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the next start will stop as well: %s", error)

    def hand_on(self) -> None:
        """Call an earlier signal handler, such as that of submitit, which requeues the job.

        Called when the session is closed, not from a signal handler; only rank 0 does it. Of the
        handlers of submitit, it calls the one that requeues, for any stop request; but not for a
        cancelled job, which would start again.

        Source: submitit/core/job_environment.py, submitit 1.5.4.
        """
        if self._rank > 0:
            return
        number = self._caught
        if _SUBMITIT in self._env:
            name = "SIG" + self._env.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
            number = getattr(signal, name, None)
            if self._job is not None and self._job.scheduler == "slurm":
                state = slurm.job_state(self._job.label, self._env)
                if state is None or state.name not in _GOES_ON:
                    word = state.name if state else "unknown"
                    logger.info("not requeued: job %s is %s", self._job.label, word)
                    return
        found = self._found.get(number) if number is not None else None
        if callable(found) and found is not signal.default_int_handler:
            found(number, None)

    def _ask(self) -> None:
        if self._job is not None:
            self._end = slurm.end_time(self._job.label, self._env)

    def _look_at_the_clock(self, what: str, needed: float) -> None:
        """Warn once if a stop request leaves too little time to save."""
        if self._rank > 0 or self._end is None or self._looked:
            return
        self._looked = True
        left = self._end - self._clock()
        if left < needed:
            logger.warning(
                "%s came %.0f s before the end of the job's time, and to stop takes up to %.0f s: "
                "#SBATCH --signal=B:USR2@%d leaves enough",
                what,
                left,
                needed,
                int(needed) + 60,  # Slurm may send the signal that late
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._process:
            self._handle_in_a_fork(number)
        elif number == signal.SIGINT and (not self._running or self._caught == signal.SIGINT):
            raise KeyboardInterrupt
        elif not self._opened or (self._caught is not None and not self._running):
            name = signal.Signals(number).name
            raise Stopped(f"{name} came outside of a run", self._env, alone=number)
        else:
            self._caught = number

    @staticmethod
    def _handle_in_a_fork(number: int) -> None:
        """In a forked process, act on SIGINT and SIGTERM; ignore signals to the whole job step."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _put_back(self) -> None:
        for number, handler in self._found.items():
            # None means that the handler was not set from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
