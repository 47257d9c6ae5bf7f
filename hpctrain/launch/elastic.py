"""Elastic launcher: start ranks again on the remaining hosts, until the run ends or stalls.

A process keeps its rank until it ends. After a change of hosts, new processes resume from the
newest checkpoint of the run directory. The run directory is on a file system that all hosts share,
and also has the files that the starts share.
"""

import itertools
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.cluster.job import detect as detect_job
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.launch.hosts import Hosts, StartParameters
from hpctrain.launch.rank_output import write_stderr
from hpctrain.rundir.exit_status import read_exit_status

__all__ = ["hopeless", "run", "run_directory", "settled"]


def settled(code: int, recorded: tuple[int, str] | None, stopped: bool) -> tuple[int, str] | None:
    """Return the exit code and reason if no other start is needed; None after a failure.

    Args:
        code: exit code of the process that started the ranks.
        recorded: content of rank 0's exit status file; None without one.
        stopped: whether this process got a signal.
    """
    exit_status, reason = recorded or (code, "")
    if (
        code == 0
        or stopped
        or exit_status in (exit_codes.DONE, UsageError.exit_code, exit_codes.STOPPED)
    ):
        # An exit status of 0 does not cover errors of a rank after its session.
        return exit_status or code, reason
    return None


def hopeless(
    failure: tuple[int, str], first: bool, changed: bool, fruitless: int
) -> tuple[int, str] | None:
    """Return the exit code and reason if another start would also fail; None if it may succeed.

    Another start may succeed if hosts were lost, or if this start made progress. A script that
    fails in its first start, with all hosts present, before its first checkpoint, would fail again.
    A script that later fails without progress gets only a few more starts.

    Args:
        failure: exit code of the failed start, and the reason.
        first: whether this was the first start.
        changed: whether a host was lost, or a newer checkpoint exists.
        fruitless: number of consecutive starts without a newer checkpoint, including this one.
    """
    if first and not changed:
        return failure
    if fruitless >= exit_codes.MOST_FRUITLESS:
        last = f": {failure[1]}" if failure[1] else ""
        return exit_codes.GIVEN_UP, f"{fruitless} starts in a row without a new checkpoint{last}"
    return None


def run_directory(arguments: Sequence[str], script: str, env: Mapping[str, str]) -> Path:
    """Return the run directory of all starts: `--run-dir`, $HPCTRAIN_RUN_DIR or default."""
    given = [
        following if argument == "--run-dir" else argument.removeprefix("--run-dir=")
        for argument, following in itertools.pairwise([*arguments, ""])
        if argument == "--run-dir" or argument.startswith("--run-dir=")
    ]
    if given and given[-1]:
        return Path(given[-1])
    if env.get(env_vars.RUN_DIR):
        return Path(env[env_vars.RUN_DIR])
    job = detect_job(env)
    return Path(rundir.default(Path(script).stem, job.label if job else None))


def run(
    hosts: Hosts,
    command: Sequence[str],
    directory: rundir.RunDirectory,
    env: Mapping[str, str],
    least: int = 1,
) -> tuple[int, str]:
    """Start ranks on the hosts, and again on the remaining hosts.

    Args:
        hosts: hosts, with the number of ranks on each.
        command: program and arguments, the same for all ranks and starts. The program has to
            resume.
        directory: run directory; the command gets it as $HPCTRAIN_RUN_DIR.
        env: environment of the ranks.
        least: smallest number of ranks; with fewer the run is given up.

    Returns:
        An exit code of `exit_codes` or the exit code of the last start, and the reason.

    Raises:
        StartError: a host does not answer before the first start.
        UsageError: the run directory cannot be made.
    """
    folder = _folder(directory)
    token = secrets.token_hex(8)
    marker = f"{env_vars.START}={token}"
    environ = {
        env_vars.SECRET: secrets.token_hex(16),
        **env,
        env_vars.START: token,
        env_vars.RUN_DIR: str(directory.path.absolute()),
    }
    try:
        present = hosts.present(marker)
        missing = [host for host in hosts.slots if host not in present]
        if missing:
            raise StartError(
                "HT210",
                f"{', '.join(missing)} of {len(hosts.slots)} hosts cannot be used",
                "that all hosts answer when the run begins",
                f"ssh {missing[0]} true (shows the reason)",
                f"leave {missing[0]} out of --hosts",
            )
        common = StartParameters(command, environ, folder, exit_status_file=folder / "exit-status")
        return _starts(hosts, common, directory, marker, least)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _starts(
    hosts: Hosts, common: StartParameters, directory: rundir.RunDirectory, marker: str, least: int
) -> tuple[int, str]:
    """Start the ranks until the run ends or is given up; see `run`."""
    remaining, fruitless = list(hosts.slots), 0
    for number in itertools.count():
        before = _newest(directory)
        start = replace(common, exit_status_file=common.folder / f"exit-status-{number}")
        code, stopped = hosts.run(remaining, start)
        recorded = read_exit_status(start.exit_status_file)
        end = settled(code, recorded, stopped)
        if end is not None:
            return end
        used, remaining = remaining, hosts.present(marker)
        lost = [host for host in used if host not in remaining]
        after = _newest(directory)
        progress = after is not None and (before is None or after > before)
        fruitless = 0 if progress else fruitless + 1
        ranks = sum(hosts.slots[host] for host in remaining)
        end = hopeless(recorded or (code, ""), not number, bool(lost) or progress, fruitless)
        if end is None and ranks < least:
            end = exit_codes.GIVEN_UP, f"{ranks} ranks are left of at least {least}"
        if end is not None:
            if end[0] == exit_codes.GIVEN_UP:
                _give_up(directory, end[1])
            return end
        write_stderr(
            f"hpctrain: start {number + 2}: {ranks} ranks on {len(remaining)} of "
            f"{len(hosts.slots)} hosts{_without(lost)}; {_from(after)}\n"
        )
    raise AssertionError  # the count has no end


def _without(lost: Sequence[str]) -> str:
    return f", without {', '.join(lost)}" if lost else ""


def _from(step: int | None) -> str:
    return "from the start, as there is no checkpoint" if step is None else f"from step {step} on"


def _newest(directory: rundir.RunDirectory) -> int | None:
    """Return the step of the newest checkpoint."""
    return max(directory.steps(), default=None)


def _give_up(directory: rundir.RunDirectory, reason: str) -> None:
    """Print that the run is given up, and write it to the summary."""
    write_stderr(f"hpctrain: given up: {reason}\n")
    if directory.identity.exists():
        directory.give_up(reason)


def _folder(directory: rundir.RunDirectory) -> Path:
    """Make the shared folder of the starts in the run directory; only this user can read it."""
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=directory.path.absolute(), prefix=".starts-"))
    except OSError as error:
        raise UsageError(
            "HT617",
            f"the run directory {directory.path} cannot be made: {error}",
            "a place that can be written, on a file system that all hosts share",
            "--run-dir DIR",
        ) from None
