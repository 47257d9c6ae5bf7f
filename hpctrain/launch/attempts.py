"""Attempts of a start: the ranks are started again after a failure, until the run ends or stalls.

A process keeps its rank until it ends. After a failure or a change of hosts, new processes resume
from the newest checkpoint of the run directory. The run directory is on a file system that all
hosts share, and also has the files that the attempts share.
"""

import contextlib
import itertools
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.job import submit_folder
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.launch.host_ends import FirstFailure, HostsEnd
from hpctrain.launch.job_hosts import Attempt, JobHosts
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import signal_name
from hpctrain.process import failure_record
from hpctrain.rundir import effective_time, host_ledger
from hpctrain.rundir.exit_status import read_exit_status
from hpctrain.rundir.used import used_so_far

__all__ = ["Policy", "hopeless", "run", "settled"]

# Exit codes of ranks that a stop signal to them has ended. Of SIGTERM it is no sign of a stop, as
# launchers end the other ranks by it.
_UNHANDLED = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)


# Errors of a rank of which its host is the cause.
_WRONG_NUMBERS = "HT318"
_OTHER_WEIGHTS = "HT623"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for further attempts.

    Attributes:
        most: number of attempts in a row without a new checkpoint after which the run is given up;
            1 for a single attempt.
        plain: whether a program without a session is started again, too.
        elastic: whether an attempt may have fewer hosts than the one before.
        least: smallest number of ranks.
        requeue_plain: whether a stop signal ends a program without a session, and counts as a stop.
        spares: number of hosts that have no ranks until another one is lost.
    """

    most: int = exit_codes.MOST_FRUITLESS
    plain: bool = False
    elastic: bool = False
    least: int = 1
    requeue_plain: bool = False
    spares: int = 0


class HostChoice:
    """Hosts on which the ranks start.

    A host that was lost is used again when it answers. One that has failed its check is not. Those
    with faults in the ledger are used only if there are no others.

    Args:
        hosts: hosts of the job.
        present: names of those that can be used now.
        spares: number of hosts that have no ranks until another one is lost.
        env: environment of the start.

    Attributes:
        wanted: number of hosts that have ranks.
        used: names of the hosts of the next attempt; fewer than `wanted` if too many are lost.
        spares: names of the others that can be used.
        lost: names of the hosts of the attempt before that cannot be used any more.
    """

    def __init__(
        self, hosts: JobHosts, present: Sequence[str], spares: int, env: Mapping[str, str]
    ) -> None:
        job = detect_job(env)
        self._hosts, self._job = hosts, job.label if job else ""
        self._top = submit_folder(env)
        self._silent: set[str] = set()  # hosts that did not answer when last asked
        self._unfit: set[str] = set()
        self.wanted = len(hosts.names) - spares
        self.used = _best(present, self.wanted, host_ledger.avoided(self._top))
        self.spares = [host for host in present if host not in self.used]
        self.lost: list[str] = []

    def after(self, end: HostsEnd) -> None:
        """Choose the hosts of the next attempt, and note faults.

        Args:
            end: end of the attempt before.
        """
        suspects = {*self._silent, *end.suspects}
        self._silent = {host for host in suspects if not self._hosts.answers(host)}
        unfit = set(end.unfit)
        if end.first is not None and end.first.error == _WRONG_NUMBERS:
            unfit.add(end.first.host)
        self._unfit |= unfit
        if end.first is not None and end.first.error == _OTHER_WEIGHTS:
            self._note({end.first.host}, host_ledger.UNLIKE)
        gone = self._silent | self._unfit
        usable = [host for host in self._hosts.present() if host not in gone]
        self.lost = [host for host in self.used if host not in usable]
        self._note(unfit, host_ledger.PREFLIGHT)
        self._note(set(self.lost) - unfit, host_ledger.LOST)
        self.used = _best(usable, self.wanted, host_ledger.avoided(self._top, self._job))
        self.spares = [host for host in usable if host not in self.used]

    def _note(self, hosts: set[str], kind: str) -> None:
        host_ledger.note(self._top, sorted(hosts), kind, self._job)


def _best(hosts: Sequence[str], wanted: int, avoided: Sequence[str]) -> list[str]:
    """Return some of the hosts in their order; those to avoid only if there are no others."""
    best = sorted(hosts, key=lambda host: host in avoided)[:wanted]
    return [host for host in hosts if host in best]


def settled(code: int, recorded: tuple[int, str] | None, stopped: bool) -> tuple[int, str] | None:
    """Return the exit code and reason if no other attempt is needed; None after a failure.

    Args:
        code: exit code of the attempt.
        recorded: content of rank 0's exit status file; None without one.
        stopped: whether this process got a signal.
    """
    exit_status, reason = recorded or (code, "")
    if recorded is None and code and (stopped or code in _UNHANDLED):
        # The signal has ended the ranks before they could handle it.
        exit_status, reason = exit_codes.STOPPED, "a signal before the first step"
    if (
        code == 0
        or stopped
        or exit_status in (exit_codes.DONE, UsageError.exit_code, exit_codes.STOPPED)
    ):
        # An exit status of 0 does not cover errors of a rank after its session.
        return exit_status or code, reason
    return None


def hopeless(
    failure: tuple[int, str], first: bool, changed: bool, fruitless: int, most: int
) -> tuple[int, str] | None:
    """Return the exit code and reason if another attempt would also fail; None if it may succeed.

    Another attempt may succeed if hosts were lost, or if this one made progress. A script that
    fails in its first attempt, with all hosts present, before its first checkpoint, would fail
    again. A script that later fails without progress gets only a few more attempts.

    Args:
        failure: exit code of the failed attempt, and the reason.
        first: whether this was the first attempt, and its program has ended by itself.
        changed: whether a host was lost, or a newer checkpoint exists.
        fruitless: number of consecutive attempts without a newer checkpoint, including this one.
        most: number of them after which the run is given up.
    """
    if (first and not changed) or most == 1:
        return failure
    if fruitless >= most:
        last = f": {failure[1]}" if failure[1] else ""
        return exit_codes.GIVEN_UP, f"{fruitless} attempts in a row without a new checkpoint{last}"
    return None


def run(
    hosts: JobHosts,
    command: Sequence[str],
    directory: rundir.RunDirectory,
    env: Mapping[str, str],
    policy: Policy,
    received: Sequence[int] = (),
) -> tuple[int, str]:
    """Start ranks on the hosts, and again after a failure.

    Args:
        hosts: hosts, with the number of ranks on each.
        command: program and arguments, the same for all ranks and attempts.
        directory: run directory; the command gets it as $HPCTRAIN_RUN_DIR.
        env: environment of the ranks.
        policy: rules for further attempts.
        received: stop signals that this process has received while no attempt ran.

    Returns:
        An exit code of `exit_codes` or the exit code of the last attempt, and the reason.

    Raises:
        StartError: a host does not answer before the first attempt.
        UsageError: the run directory cannot be made.
    """
    launch = secrets.token_hex(8)
    environ = {
        **env,
        env_vars.SECRET: secrets.token_hex(16),
        env_vars.START: launch,
        env_vars.LAUNCHED: str(time.time()),
        env_vars.RUN_DIR: str(directory.path.absolute()),
    }
    present = hosts.present()
    missing = [host for host in hosts.names if host not in present]
    if len(missing) > policy.spares:
        raise StartError(hosts.unusable, missing=",".join(missing), nodes=len(hosts.names))
    choice = HostChoice(hosts, present, policy.spares, environ)
    folder = _folder(directory, env)
    first = Attempt(command, environ, folder, launch, 0, ends_plain=policy.requeue_plain)
    try:
        return _attempts(hosts, choice, first, directory, policy, received)
    finally:
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.path.rmdir()  # the program has failed before its run


def _attempts(
    hosts: JobHosts,
    choice: HostChoice,
    first: Attempt,
    directory: rundir.RunDirectory,
    policy: Policy,
    received: Sequence[int],
) -> tuple[int, str]:
    """Start the ranks until the run ends or is given up; see `run`.

    The folder of `first` is that of all attempts, each of which has a folder in it.
    """
    common, fruitless = first.folder, 0
    resumes = policy.plain  # whether the program was seen to have a session
    for number in itertools.count():
        before = directory.furthest()
        folder = common / str(number)
        folder.mkdir(mode=0o700, exist_ok=True)
        # After a failed attempt the newest state is on the disk already.
        if received and (first.ends_plain or number):
            return exit_codes.STOPPED, "a signal"
        attempt = replace(
            first, environ=_environ(first), folder=folder, number=number, stopping=bool(received)
        )
        following = replace(attempt, folder=common / f"{number + 1}-waiting", number=number + 1)
        end = hosts.run(choice.used, attempt, following if policy.most > 1 else None, choice.spares)
        folder = end.folder or folder
        if not end.usage:
            failed = end.first.time if end.first else None
            launched = float(first.environ[env_vars.LAUNCHED])
            effective_time.note_attempt(directory.current(), launched, failed)
        recorded = read_exit_status(folder / "exit-status-0")
        stopped = end.stopped or bool(received)
        if first.ends_plain and stopped and not failure_record.sessions(folder):
            # Whatever its exit code: a program that has already done its work does no more.
            return exit_codes.STOPPED, "a signal"
        result = settled(end.code, recorded, stopped)
        _report(end, recorded)
        if result is not None:
            return result
        choice.after(end)
        used, lost = choice.used, choice.lost
        after = directory.furthest()
        progress = after is not None and (before is None or after > before)
        fruitless = 0 if progress else fruitless + 1
        failure = recorded[0] if recorded else end.code, _cause(end.first, recorded)
        by_itself = not number and end.code < 128
        result = hopeless(failure, by_itself, bool(lost) or progress, fruitless, policy.most)
        # A rank may fail before its session; and if a host is unfit, no program has failed.
        resumes = resumes or bool(failure_record.sessions(folder))
        if result is None and not (resumes or end.unfit):
            result = failure
        ranks = sum(hosts.ranks(host) for host in used)
        if result is None and (ranks < policy.least or not used):
            result = exit_codes.GIVEN_UP, f"{ranks} ranks are left of at least {policy.least}"
        if result is None and len(used) < choice.wanted and not policy.elastic:
            result = exit_codes.STOPPED, f"{', '.join(lost)} of the job's hosts are lost"
        if result is not None:
            _record(directory, first.environ, *result)
            return result
        without = f", without {', '.join(lost)}" if lost else ""
        announce(
            f"attempt {number + 2}: {len(used)} of {len(hosts.names)} hosts{without}; "
            f"{_from(after)}"
        )
    raise AssertionError  # the count has no end


def _environ(first: Attempt) -> Mapping[str, str]:
    """Return the environment of an attempt; one before may have asked for new interpreters."""
    asked = any(map(failure_record.fresh, first.folder.iterdir()))
    return {**first.environ, env_vars.FRESH: "1"} if asked else first.environ


def _report(end: HostsEnd, recorded: tuple[int, str] | None) -> None:
    """Print which rank failed first, because its error is the cause of the other errors."""
    first = end.first
    killed = end.code - 128 in signal.valid_signals()  # srun has other codes above 128, such as 233
    if first is None and recorded is None and killed:
        name = signal_name(end.code - 128)
        announce(f"{name} ended all ranks at once, as a scheduler does that ends their step")
    # After a usage error every rank has printed the same few lines.
    if first is None or end.ranks == 1 or end.usage:
        return
    if recorded is not None and recorded[0] == exit_codes.STOPPED:
        return
    where = f" on {first.host}" if first.host else ""
    announce(f"rank {first.rank}{where} {first.conclusion}")


def _from(step: int | None) -> str:
    return "from the start, as there is no checkpoint" if step is None else f"from step {step} on"


def _cause(first: FirstFailure | None, recorded: tuple[int, str] | None) -> str:
    """Return the cause of a failure in one line.

    Rank 0 writes the exit status file, also where the failure of another rank is the cause.
    """
    if first is not None and not first.caused_by_other_rank:
        where = f" on {first.host}" if first.host else ""
        how = first.brief.partition("\n")[0].removesuffix(". Its last lines:")
        return f"rank {first.rank}{where} failed, {how}"
    return recorded[1] if recorded else ""


def _record(directory: rundir.RunDirectory, env: Mapping[str, str], code: int, reason: str) -> None:
    """Write the end to the summary; print why a run is given up, where its time went, its use."""
    directory = directory.current()
    effective = effective_time.measure(directory)
    if code == exit_codes.GIVEN_UP:
        announce(f"given up: {reason}")
        if effective is not None:
            announce(str(effective))
    if code == exit_codes.STOPPED or not directory.identity.exists():
        return
    for name, text in used_so_far(directory, effective, False) if detect_job(env) else ():
        announce(f"{name}: {text}")
    directory.record_end(code, reason, **(effective.as_json() if effective else {}))


def _folder(directory: rundir.RunDirectory, env: Mapping[str, str]) -> Path:
    """Make the shared folder of the attempts in the run directory; only this user can read it.

    Folders of earlier starts of the job are removed: a start that was killed has left its own.
    """
    job = detect_job(env)
    label, restart = (job.label, job.restart_count) if job else ("", 0)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        for old in directory.path.glob(f".attempts-{label}-*"):
            number = old.name.split("-")[2]
            if number.isdecimal() and int(number) < restart:
                shutil.rmtree(old, ignore_errors=True)
        prefix = f".attempts-{label}-{restart}-"
        return Path(tempfile.mkdtemp(dir=directory.path.absolute(), prefix=prefix))
    except OSError as error:
        raise UsageError("HT617.cannot-create", directory=directory, error=error) from None
