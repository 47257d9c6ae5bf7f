"""What asks a run to stop: signals, a stop file, the end of the job's time.

A handler only sets a flag: Python runs none while a collective waits, and ranks that save at
different steps save nothing. The run asks for the flag, agrees with the other ranks, saves, and
leaves by `Stopped`.
"""

import builtins
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
from hpctrain.cluster import env_vars, slurm
from hpctrain.cluster.job import Allocation
from hpctrain.process import signals
from hpctrain.process.logging import logger

__all__ = ["REASONS", "Preemption", "Stopped"]

_TIME_LIMIT, _STOP_FILE = "the end of the job's time", "a stop file"
_SUBMITIT = "SUBMITIT_EXECUTOR"
# SIGNALING is what Slurm shows for a moment after it has sent a signal.
_GOES_ON = ("RUNNING", "SIGNALING")
_TAKEN = (*signals.STOP, signal.SIGINT)

#: Why a run stops; ranks tell each other by the place in this list.
REASONS = (_TIME_LIMIT, _STOP_FILE, *(signal.Signals(number).name for number in _TAKEN))


class Stopped(SystemExit):
    """Leaves the script at a safe point: run it again, and it goes on.

    The exit code is 75. Where $HPCTRAIN_VERDICT is set, whoever started the ranks decides: then it
    is 0, as the verdict says more; or that of a process which the signal ended, as this rank cannot
    know whether all of them were to stop. (srun and mpirun send SIGTERM to the others when one rank
    fails. A job that was then taken for stopped would be requeued, and fail again, without end.)

    Args:
        reason: a line for people.
        env: the environment.
        alone: the signal that came to this rank before training began; None: all ranks leave now.
    """

    def __init__(self, reason: str, env: Mapping[str, str], alone: int | None = None) -> None:
        told = 0 if alone is None else 128 + alone
        super().__init__(told if env.get(env_vars.VERDICT) else rundir.STOPPED)
        self.reason = reason
        self.together = alone is None


class Preemption:
    """Whether, and by what, this rank was asked to stop.

    While the session opens, a signal ends the process with `Stopped`: nothing is lost there. From
    then on the others would miss this rank, so the run that follows is stopped, at its beginning or
    at a step; outside of one a second signal ends the process. SIGINT stops a run as the others do,
    and ends it at once when it comes for the second time. It is left alone where a person types the
    lines, in a notebook or an interactive Python.

    Args:
        rank: only rank 0 looks at stop files and the clock.
        env: for $HPCTRAIN_STOP and $HPCTRAIN_VERDICT.
        job: the scheduler's, for the end of its time.
        undo: takes what puts the handlers back.
        clock: seconds since the epoch; a test moves one of its own.
    """

    def __init__(
        self,
        rank: int,
        env: Mapping[str, str],
        job: Allocation | None,
        undo: ExitStack,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank, self._env, self._process = rank, env, os.getpid()
        self._job, self._clock = job, clock
        self._end = job.end_time if job is not None else None
        self._of_the_start = Path(env[env_vars.STOP]) if env.get(env_vars.STOP) else None
        self._of_the_run: Path | None = None
        self._caught: int | None = None
        self._opened = self._running = self._looked = False
        self._found: dict[int, Any] = {}
        self._save_margin: Callable[[], float] = lambda: 0.0
        if threading.current_thread() is not threading.main_thread():
            return  # handlers belong to the main thread
        interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
        for number in signals.STOP if interactive else _TAKEN:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue  # as in the background of a shell's script, which is not to hear Ctrl-C
            self._found[number] = signal.signal(number, self._handle)
        undo.callback(self._put_back)

    def opened(self) -> None:
        """The ranks are connected."""
        self._opened = True

    def begin(self, directory: rundir.RunDirectory, save_margin: Callable[[], float]) -> None:
        """From now on a signal is a request, until `end`.

        Args:
            directory: of the run; a file `stop` in it is a request too.
            lead: seconds before the end of the job's time that saving needs.
        """
        self._of_the_run = directory.stop
        self._save_margin = save_margin
        self._running = True
        if self._rank == 0 and self._end is None and self._job and self._job.scheduler == "slurm":
            # Older ones, such as 22.05, do not tell their jobs; a busy one is not waited for.
            threading.Thread(target=self._ask, name="end of the job", daemon=True).start()

    def end(self) -> None:
        """The run is over, and no file asks for anything."""
        self._running = False
        self._of_the_run = None

    def close(self) -> None:
        """The session ends, and what comes now comes too late."""
        self._running = True

    def asked(self) -> str | None:
        """One of `REASONS`, or None; looks at files, so not to be called at every step."""
        if self._caught is not None:
            self._look_at_the_clock(signal.Signals(self._caught).name)
            return signal.Signals(self._caught).name
        if self._rank > 0:
            return None
        # os.path.exists takes what a file system says in a bad moment for a no.
        if any(file and os.path.exists(file) for file in (self._of_the_start, self._of_the_run)):
            self._look_at_the_clock(_STOP_FILE)
            return _STOP_FILE
        if self._end is not None and self._clock() + self._save_margin() >= self._end:
            return _TIME_LIMIT
        return None

    def obeyed(self, directory: rundir.RunDirectory) -> None:
        """The run has saved; a person's stop file would stop the next start as well."""
        if self._rank == 0:
            try:
                directory.stop.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the next start will stop as well: %s", error)

    def hand_on(self) -> None:
        """Let a handler that was there before do its part, such as submitit's, which requeues.

        Called on rank 0 when the session is closed, and not from within a handler. Of submitit's
        handlers that which requeues is called, whatever came, and not for a job that is cancelled:
        it would come back to life.

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
                if state is None or state.word not in _GOES_ON:
                    word = state.word if state else "unknown"
                    logger.info("not requeued: job %s is %s", self._job.label, word)
                    return
        found = self._found.get(number) if number is not None else None
        if callable(found) and found is not signal.default_int_handler:
            found(number, None)

    def _ask(self) -> None:
        if self._job is not None:
            self._end = slurm.end_time(self._job.label, self._env)

    def _look_at_the_clock(self, what: str) -> None:
        """Once, say so where a request comes late."""
        if self._rank > 0 or self._end is None or self._looked:
            return
        self._looked = True
        left, needed = self._end - self._clock(), self._save_margin()
        if left < needed:
            logger.warning(
                "%s came %.0f s before the end of the job's time, and to stop takes up to %.0f s: "
                "#SBATCH --signal=B:USR2@%d leaves enough",
                what,
                left,
                needed,
                int(needed) + 60,  # Slurm may be that late
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
        """A process that a rank has forked outlives what goes to the whole step, and not TERM."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _put_back(self) -> None:
        for number, handler in self._found.items():
            # None stands for a handler that was not set from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
