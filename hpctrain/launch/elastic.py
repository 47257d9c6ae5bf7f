"""Starts ranks again on the hosts that are left, until the run is over or makes no progress.

Ranks stay what they are while their processes live: changed hosts mean new processes, which resume
from the newest checkpoint of the run directory. That one is on a file system that all hosts share,
and holds what the starts share as well.
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
from hpctrain.errors import StartError, UsageError
from hpctrain.launch.hosts import Hosts, Start
from hpctrain.launch.rank_output import say

__all__ = ["hopeless", "run", "run_directory", "settled"]


def settled(code: int, said: tuple[int, str] | None, stopped: bool) -> tuple[int, str] | None:
    """The exit code and why, where nobody wants another start; None after any other failure.

    Args:
        code: of whoever started the ranks.
        said: rank 0's verdict; None without one.
        stopped: a signal came here meanwhile.
    """
    verdict, reason = said or (code, "")
    if code == 0 or stopped or verdict in (rundir.DONE, UsageError.exit_code, rundir.STOPPED):
        # A verdict of 0 does not cover what a rank did after its session.
        return verdict or code, reason
    return None


def hopeless(
    failure: tuple[int, str], first: bool, changed: bool, fruitless: int
) -> tuple[int, str] | None:
    """The exit code and why, where another start would fail as well; None where it may not.

    It may do better where hosts were lost, or where this start came further than the one before. A
    script that fails at its first start, on hosts that all answer, before its first checkpoint,
    would do so again. Where it fails later, at the same step again, that is given up after a few.

    Args:
        failure: exit code of the start that failed, and why.
        first: there was none before.
        changed: a host was lost, or a newer checkpoint is there.
        fruitless: starts in a row without a newer checkpoint, this one included.
    """
    if first and not changed:
        return failure
    if fruitless >= rundir.MOST_FRUITLESS:
        last = f": {failure[1]}" if failure[1] else ""
        return rundir.GIVEN_UP, f"{fruitless} starts in a row without a new checkpoint{last}"
    return None


def run_directory(arguments: Sequence[str], script: str, env: Mapping[str, str]) -> Path:
    """The run directory of all starts: the script's `--run`, $HPCTRAIN_RUN, or the default one."""
    given = [
        following if argument == "--run" else argument.removeprefix("--run=")
        for argument, following in itertools.pairwise([*arguments, ""])
        if argument == "--run" or argument.startswith("--run=")
    ]
    if given and given[-1]:
        return Path(given[-1])
    if env.get(env_vars.RUN):
        return Path(env[env_vars.RUN])
    job = detect_job(env)
    return Path(rundir.default(Path(script).stem, job.label if job else None))


def run(
    hosts: Hosts,
    command: Sequence[str],
    directory: rundir.RunDirectory,
    env: Mapping[str, str],
    least: int = 1,
) -> tuple[int, str]:
    """Start ranks on the hosts, and again on those that are left.

    Args:
        hosts: where, and how many on each.
        command: program and arguments, the same for all ranks and starts. It has to resume.
        directory: of the run; the command gets it as $HPCTRAIN_RUN.
        env: for the ranks.
        least: ranks; with fewer the run is given up.

    Returns:
        An exit code of `rundir` or that of the last start, and why.

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
        env_vars.RUN: str(directory.path.absolute()),
    }
    try:
        there = hosts.present(marker)
        missing = [host for host in hosts.slots if host not in there]
        if missing:
            raise StartError(
                f"{', '.join(missing)} of {len(hosts.slots)} hosts cannot be used",
                "that all hosts answer when the run begins",
                f"ssh {missing[0]} true    says why; or leave it out of --hosts",
            )
        common = Start(command, environ, folder, verdict=folder / "verdict")
        return _starts(hosts, common, directory, marker, least)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _starts(
    hosts: Hosts, common: Start, directory: rundir.RunDirectory, marker: str, least: int
) -> tuple[int, str]:
    """One start after the other; see `run`."""
    there, fruitless = list(hosts.slots), 0
    for number in itertools.count():
        before = _newest(directory)
        start = replace(common, verdict=common.folder / f"verdict-{number}")
        code, stopped = hosts.run(there, start)
        said = rundir.read_verdict(start.verdict)
        end = settled(code, said, stopped)
        if end is not None:
            return end
        used, there = there, hosts.present(marker)
        lost = [host for host in used if host not in there]
        after = _newest(directory)
        progress = after is not None and (before is None or after > before)
        fruitless = 0 if progress else fruitless + 1
        ranks = sum(hosts.slots[host] for host in there)
        end = hopeless(said or (code, ""), not number, bool(lost) or progress, fruitless)
        if end is None and ranks < least:
            end = rundir.GIVEN_UP, f"{ranks} ranks are left of at least {least}"
        if end is not None:
            if end[0] == rundir.GIVEN_UP:
                _give_up(directory, end[1])
            return end
        say(
            f"hpctrain: start {number + 2}: {ranks} ranks on {len(there)} of {len(hosts.slots)} "
            f"hosts{_without(lost)}; {_from(after)}\n"
        )
    raise AssertionError  # the count has no end


def _without(lost: Sequence[str]) -> str:
    return f", without {', '.join(lost)}" if lost else ""


def _from(step: int | None) -> str:
    return "from the start, as there is no checkpoint" if step is None else f"from step {step} on"


def _newest(directory: rundir.RunDirectory) -> int | None:
    """The step of the newest checkpoint."""
    return max(directory.steps(), default=None)


def _give_up(directory: rundir.RunDirectory, reason: str) -> None:
    """Say so, to people and in the summary."""
    say(f"hpctrain: given up: {reason}\n")
    if directory.identity.exists():
        directory.give_up(reason)


def _folder(directory: rundir.RunDirectory) -> Path:
    """What the starts share, in the run directory; only this user reads it."""
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=directory.path.absolute(), prefix=".starts-"))
    except OSError as error:
        raise UsageError(
            f"the run directory {directory.path} cannot be made: {error}",
            "a place that can be written, on a file system that all hosts share",
            "--run DIR",
        ) from None
