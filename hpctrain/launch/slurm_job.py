"""The batch job of Slurm in which `hpctrain run` starts the ranks: its names, and what follows it.

A job that was stopped goes back into the queue. A job that ended otherwise, or that a person has
stopped or cancelled, does not.
"""

import contextlib
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars, slurm
from hpctrain.cluster.job import Allocation, submit_folder
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.launchers.base import hosts_of_job
from hpctrain.errors import UsageError, exit_codes
from hpctrain.launch.rank_output import announce
from hpctrain.process import signals
from hpctrain.rundir import host_ledger

__all__ = ["SlurmJob", "own_environment", "stop_signals"]

# SIGNALING is the state that Slurm shows for a moment after it has sent a signal.
_GOES_ON = ("RUNNING", "SIGNALING")
_SECONDS_UNTIL_END = 60.0  # Slurm ends a job within seconds after its requeue
# Of a shorter limit, the time from the begin of training to the stop signal can be nothing.
_SHORT_LIMIT = 200.0


@contextlib.contextmanager
def stop_signals(in_batch: bool) -> Iterator[list[int]]:
    """Collect stop signals, which may come before the ranks start and between two attempts.

    Args:
        in_batch: whether this process runs in a batch script. Until then the script ignores the
            signal that the job has asked for, as bash would end at it; it may be any signal.
    """
    received: list[int] = []
    numbers = (*signals.STOP, signal.SIGINT, signal.SIGHUP) if in_batch else signals.STOP
    before = {
        number: signal.signal(number, lambda caught, _: received.append(caught))
        for number in numbers
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job without what it has inherited from an outer job.

    A job that was submitted inside another job inherits its variables. Slurm overwrites only some
    of them: array variables only in an array, and the restart count only after a requeue.

    Args:
        env: environment of the batch script.
    """
    own = dict(env)
    if own.get(env_vars.STOP_FILE) and own.pop(env_vars.RUN_DIR, ""):
        announce(f"{env_vars.RUN_DIR} is ignored: it is that of the job that called sbatch")
    own.pop(env_vars.STOP_FILE, None)
    own = slurm.of_all_parts(own)
    if any(map(own.get, env_vars.OF_A_SHELL)):
        # In a task of srun, it is that of the step.
        tasks, hosts = own.get("SLURM_NTASKS_PER_NODE", "1"), hosts_of_job(own)
        own["SLURM_TASKS_PER_NODE"] = f"{tasks}(x{len(hosts)})"
    if not (env.get("SLURM_ARRAY_TASK_ID") or env.get("SLURM_RESTART_COUNT")):
        return own
    try:
        listed = slurm.jobs(own, [env["SLURM_JOB_ID"]])
    except slurm.NoAnswerError:
        return own
    for job in listed:
        if job.number == env["SLURM_JOB_ID"]:
            if not job.task.isdecimal():
                own = {k: v for k, v in own.items() if not k.startswith("SLURM_ARRAY_")}
            own["SLURM_RESTART_COUNT"] = str(job.restarts)
    return own


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """Batch job of Slurm.

    Attributes:
        env: environment of the batch script, as `own_environment` returns it.
        allocation: the job, from these variables.
        max_restarts: largest number of restarts; None for no limit.
        began: time of this launch.
    """

    env: Mapping[str, str]
    allocation: Allocation
    max_restarts: int | None = None
    began: float = field(default_factory=time.time)

    @classmethod
    def here(cls, env: Mapping[str, str], max_restarts: int | None) -> "SlurmJob":
        """Return the job of this process.

        Args:
            env: environment of this process.
            max_restarts: largest number of restarts; None for no limit.
        """
        own = own_environment(env)
        allocation = detect_job(own)
        assert allocation is not None  # the caller has found it
        return cls(own, allocation, max_restarts)

    def run_directory(self, given: str | None) -> Path:
        """Return the run directory, the same for all starts of the job.

        Args:
            given: path from the command line; tasks of an array get folders in it.

        Raises:
            UsageError: $HPCTRAIN_RUN_DIR names one directory for all tasks of an array.
        """
        top = submit_folder(self.env)
        count = self.env.get("SLURM_ARRAY_TASK_COUNT", "1")
        exported = self.env.get(env_vars.RUN_DIR)
        if exported and self.allocation.array_task is not None and count not in ("", "1"):
            raise UsageError("HT804.one-run-dir-for-array", run_dir=exported, tasks=count)
        if exported:
            return top / exported
        if given:
            task = self.allocation.array_task
            return top / given / ("" if task is None else str(task))
        name = self.env.get("SLURM_JOB_NAME", "job").replace("/", "_")
        return top / rundir.default(name, self.allocation.label)

    def after(self, code: int, reason: str, directory: Path) -> int:
        """Requeue a stopped job; else print how to continue. Return the exit code of the job.

        Args:
            code: exit code of the run.
            reason: reason of its end.
            directory: run directory.
        """
        label = self.allocation.label
        if code == exit_codes.STOPPED:
            code, refused = self._stopped(reason, directory)
            if not refused:
                announce(f"Slurm itself starts job {label} again")
                return code
            announce(f"job {label} is not started again: {refused}")
        elif code != exit_codes.GIVEN_UP or self._warn_of_short_limit(directory):
            return code
        if rundir.RunDirectory(directory).furthest() is not None:
            task = self.allocation.array_task
            array = "" if task is None else f"--array={task} "
            announce(
                f"its checkpoints are in {directory}\n  fix:      hpctrain requeue "
                f"{label}\n  or:       {env_vars.RUN_DIR}={shlex.quote(str(directory))} sbatch "
                f"{array}SCRIPT --resume (if Slurm refuses that, or has forgotten the job)"
            )
        return code

    def _warn_of_short_limit(self, directory: Path) -> bool:
        """Say that the time limit leaves no time to train; return whether that is so."""
        end = slurm.end_time(self.allocation.label, self.env)
        if end is None or end - self.began > _SHORT_LIMIT:
            return False
        announce(
            f"its time limit leaves little time to train: {end - self.began:.0f} s from the start "
            f"of the launch, and Slurm sends the stop signal up to {slurm.SIGNAL_EARLY} s early\n"
            "  fix:      hpctrain submit --time 10m or longer … --run-dir "
            f"{shlex.quote(str(directory))} -- … --resume"
        )
        return True

    def _stopped(self, reason: str, directory: Path) -> tuple[int, str]:
        """Requeue a stopped job; else return its exit code and the reason, as `_requeue` does."""
        if reason.startswith(rundir.STOP_REASON):
            return exit_codes.STOPPED, f"stopped by {rundir.STOP_REASON}"
        count, job, error = self.allocation.restart_count, None, ""
        try:
            listed = slurm.jobs(self.env, [self.allocation.label])
            # The label may be that of another job, if Slurm did not answer `own_environment`.
            job = next((one for one in listed if one.number == self.allocation.job_id), None)
        except slurm.NoAnswerError as no_answer:
            error = str(no_answer)
        # Slurm counts a requeue at once, before it ends the processes of the job.
        if job is not None and job.restarts > count:
            return exit_codes.STOPPED, ""
        if self.max_restarts is not None and count >= self.max_restarts:
            refused = f"it was restarted {count} times, and the limit is {self.max_restarts}"
            return exit_codes.GIVEN_UP, refused
        if job is None or job.state not in _GOES_ON:
            return exit_codes.STOPPED, error or f"its state is {job.state if job else 'unknown'}"
        return exit_codes.STOPPED, self._requeue(job, directory)

    def _requeue(self, job: slurm.QueuedJob, directory: Path) -> str:
        """Requeue the job, which ends this process; return the reason if that is not possible.

        The reason is empty if Slurm itself starts the job again as it ends, as after a preemption.
        A job that is no longer running was not to get here: a cancelled one must not start again.
        """
        label = self.allocation.label
        if job.preempted and slurm.requeues_preempted(label, job.partition, self.env):
            return ""
        self._warn_of_short_limit(directory)
        # Slurm ends this process by SIGTERM, which waits until all is done, and much later by
        # SIGKILL.
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            slurm.requeue_unended(label, self.env)
            self._exclude(job.partition)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            time.sleep(_SECONDS_UNTIL_END)
        except slurm.NoAnswerError as error:
            return str(error)
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return "scontrol requeue was accepted, but the job continues"

    def _exclude(self, partition: str) -> None:
        """Exclude nodes with faults; only a waiting job takes this, so it is requeued before."""
        nodes = host_ledger.avoided(submit_folder(self.env), self.allocation.label)
        if not nodes:
            return
        label, had = self.allocation.label, hosts_of_job(self.env)
        try:
            excluded, required = slurm.exclude(label, nodes, had, partition, self.env)
        except slurm.NoAnswerError as error:
            announce(f"{', '.join(nodes)} may be used again: {error}")
            return
        if excluded:
            names = ", ".join(excluded)
            announce(f"the next start leaves out {names}, which had faults ({host_ledger.LEDGER})")
        if required:
            names = ", ".join(required)
            announce(f"{names} had faults, but the job requires it (--nodelist)")
