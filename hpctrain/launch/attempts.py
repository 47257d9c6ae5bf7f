"""Attempts of a start: the ranks are started again after a failure, until the run ends or stalls.

A process keeps its rank until it ends. After a failure or a change of hosts, new processes resume
from the newest checkpoint of the run directory. The run directory is on a file system that all
hosts share, and also has the files that the attempts share.
"""

import contextlib
import itertools
import os
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
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.launch.agent import FirstFailure
from hpctrain.launch.hosts import Attempt, Hosts, HostsEnd
from hpctrain.launch.rank_output import write_stderr
from hpctrain.process import failure_record
from hpctrain.rundir import effective_time, host_ledger
from hpctrain.rundir.exit_status import read_exit_status

__all__ = ["Policy", "hopeless", "run", "settled"]

_WRONG_NUMBERS = "HT318"  # found by the first computation of a rank
# Exit codes of ranks that a stop signal to them has ended. Of SIGTERM it is no sign of a stop, as
# launchers end the other ranks by it.
_UNHANDLED = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)


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
    hosts: Hosts,
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
    present = hosts.present(launch)
    missing = [host for host in hosts.names if host not in present]
    if len(missing) > policy.spares:
        raise StartError(
            "HT210",
            f"{', '.join(missing)} of {len(hosts.names)} hosts cannot be used",
            "that all hosts answer when the run begins",
            *hosts.fixes(missing[0]),
        )
    folder = _folder(directory, env)
    try:
        return _attempts(
            hosts, present, command, directory, environ, policy, folder, launch, received
        )
    finally:
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.path.rmdir()  # the program has failed before its run


def _attempts(
    hosts: Hosts,
    present: Sequence[str],
    command: Sequence[str],
    directory: rundir.RunDirectory,
    environ: Mapping[str, str],
    policy: Policy,
    common: Path,
    launch: str,
    received: Sequence[int],
) -> tuple[int, str]:
    """Start the ranks until the run ends or is given up; see `run`."""
    wanted = len(hosts.names) - policy.spares
    top, label = _job(environ)
    used, fruitless = _best(present, wanted, host_ledger.avoided(top)), 0
    silent: set[str] = set()  # hosts that did not answer when last asked
    unfit: set[str] = set()
    for number in itertools.count():
        before = _newest(directory)
        folder = common / str(number)
        folder.mkdir(mode=0o700, exist_ok=True)
        plain = policy.requeue_plain
        if plain and received:
            return exit_codes.STOPPED, "a signal"
        attempt = Attempt(command, environ, folder, launch, number, bool(received), plain)
        following = replace(attempt, folder=common / f"{number + 1}-waiting", number=number + 1)
        end = hosts.run(used, attempt, following if policy.most > 1 else None)
        folder = end.folder or folder
        if not end.usage:
            failed = end.first.time if end.first else None
            effective_time.note_attempt(directory, float(environ[env_vars.LAUNCHED]), failed)
        recorded = read_exit_status(folder / "exit-status-0")
        stopped = end.stopped or bool(received)
        if plain and stopped and not failure_record.sessions(folder):
            # Whatever its exit code: a program that has already done its work does no more.
            return exit_codes.STOPPED, "a signal"
        result = settled(end.code, recorded, stopped)
        if result is not None:
            _report(end.first, end, recorded)
            return result
        _report(end.first, end, recorded)
        silent = {host for host in (*silent, *end.suspects) if not hosts.answers(host)}
        unfit.update(_unfit(end))
        usable = [h for h in hosts.present(launch) if h not in silent and h not in unfit]
        lost = [host for host in used if host not in usable]
        _note_faults(end, lost, top, label)
        remaining = _best(usable, wanted, host_ledger.avoided(top, label))
        after = _newest(directory)
        progress = after is not None and (before is None or after > before)
        fruitless = 0 if progress else fruitless + 1
        failure = recorded[0] if recorded else end.code, _cause(end.first, recorded)
        by_itself = not number and (end.first is None or end.first.code < 128)
        result = hopeless(failure, by_itself, bool(lost) or progress, fruitless, policy.most)
        ran = not end.unfit  # else no program has failed
        if result is None and ran and not (policy.plain or failure_record.sessions(folder)):
            result = failure
        used = remaining
        ranks = sum(hosts.ranks(host) for host in used)
        if result is None and (ranks < policy.least or not used):
            result = exit_codes.GIVEN_UP, f"{ranks} ranks are left of at least {policy.least}"
        if result is None and len(used) < wanted and not policy.elastic:
            result = exit_codes.STOPPED, f"{', '.join(lost)} of the job's hosts are lost"
        if result is not None:
            _record(directory, *result)
            return result
        write_stderr(
            f"hpctrain: attempt {number + 2}: {len(used)} of {len(hosts.names)} hosts"
            f"{_without(lost)}; {_from(after)}\n"
        )
    raise AssertionError  # the count has no end


def _job(env: Mapping[str, str]) -> tuple[Path, str]:
    """Return the folder from which the job was submitted, and the label of the job."""
    job = detect_job(env)
    return Path(env.get("SLURM_SUBMIT_DIR") or os.getcwd()), job.label if job else ""


def _unfit(end: HostsEnd) -> set[str]:
    """Return the hosts that failed their check, or on which a rank did."""
    wrong = end.first is not None and end.first.error == _WRONG_NUMBERS
    return {*end.unfit, *([end.first.host] if end.first and wrong else [])}


def _note_faults(end: HostsEnd, lost: Sequence[str], top: Path, job: str) -> None:
    unfit = _unfit(end)
    host_ledger.note(top, sorted(unfit), host_ledger.PREFLIGHT, job)
    host_ledger.note(top, [host for host in lost if host not in unfit], host_ledger.LOST, job)


def _best(hosts: Sequence[str], wanted: int, avoided: Sequence[str]) -> list[str]:
    """Return some of the hosts in their order; those to avoid only if there are no others."""
    best = sorted(hosts, key=lambda host: host in avoided)[:wanted]
    return [host for host in hosts if host in best]


def _report(first: FirstFailure | None, end: HostsEnd, recorded: tuple[int, str] | None) -> None:
    """Print which rank failed first, because its error is the cause of the other errors."""
    # After a usage error every rank has printed the same few lines.
    if first is None or end.ranks == 1 or end.usage:
        return
    if recorded is not None and recorded[0] == exit_codes.STOPPED:
        return
    where = f" on {first.host}" if first.host else ""
    write_stderr(f"hpctrain: rank {first.rank}{where} failed first, {first.brief}\n")


def _without(lost: Sequence[str]) -> str:
    return f", without {', '.join(lost)}" if lost else ""


def _from(step: int | None) -> str:
    return "from the start, as there is no checkpoint" if step is None else f"from step {step} on"


def _newest(directory: rundir.RunDirectory) -> int | None:
    """Return the step of the newest checkpoint."""
    return max(directory.steps(), default=None)


def _cause(first: FirstFailure | None, recorded: tuple[int, str] | None) -> str:
    """Return the cause of a failure in one line.

    Rank 0 writes the exit status file, also where the failure of another rank is the cause.
    """
    if first is not None and not first.caused_by_other_rank:
        where = f" on {first.host}" if first.host else ""
        how = first.brief.partition("\n")[0].removesuffix(". Its last lines:")
        return f"rank {first.rank}{where} failed, {how}"
    return recorded[1] if recorded else ""


def _record(directory: rundir.RunDirectory, code: int, reason: str) -> None:
    """Write the end to the summary; print why a run is given up, and where its time went."""
    effective = effective_time.measure(directory)
    if code == exit_codes.GIVEN_UP:
        write_stderr(f"hpctrain: given up: {reason}\n")
        if effective is not None:
            write_stderr(f"hpctrain: {effective}\n")
    if code != exit_codes.STOPPED and directory.identity.exists():
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
        raise UsageError(
            "HT617",
            f"the run directory {directory.path} cannot be made: {error}",
            "a place that can be written, on a file system that all hosts share",
            "--run-dir DIR",
        ) from None
