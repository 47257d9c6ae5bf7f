"""Hosts of a scheduler's job, any of which may be lost: an agent on each starts the ranks there.

Python, hpctrain, the script and the run directory must have the same paths on all hosts.
"""

import contextlib
import json
import queue
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.errors import StartError
from hpctrain.launch import rank_environment, supervisor
from hpctrain.launch.host_ends import Ends, HostsEnd, read_ends
from hpctrain.launch.host_start import Plan
from hpctrain.launch.rank_processes import Started
from hpctrain.launch.standby import Standby, Step, command_that_waits
from hpctrain.process import failure_record

__all__ = ["Attempt", "Inside", "JobHosts"]

# A program that fails in its first seconds is not started again, unless it has run before.
_SECONDS_BEFORE_STANDBY = 10
_SECONDS_IN_LATER_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Attempt:
    """Parameters of one attempt, equal for all its ranks.

    Attributes:
        command: program and arguments.
        environ: environment of the ranks.
        folder: folder of this attempt, on a file system that all hosts share; only this user can
            read it.
        launch: name of the launcher's run, the same for all its attempts.
        number: number of earlier attempts.
        stopping: whether the ranks are to stop at once, as a signal has come before.
        ends_plain: whether a stop signal ends a program without a session.
        waits: whether the ranks wait until they are needed; see `standby`.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    launch: str
    number: int
    stopping: bool = False
    ends_plain: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Inside:
    """What surrounds the ranks on each host.

    Attributes:
        staging: code, environment and data that each host copies, as in `Plan`.
        container: image in which the ranks run; empty for none.
        variables: names of variables that override those of the image.
        label: label of the job and number of its start.
    """

    staging: Sequence[str] = ("", "", "")
    container: str = ""
    variables: Sequence[str] = ()
    label: str = "0-0"


class JobHosts(ABC):
    """Hosts of a job.

    Args:
        counts: number of ranks of each host, by its name, in the order of the ranks; 0 for one for
            each GPU.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it; None for
            `counts`.
        inside: what surrounds the ranks.

    Raises:
        UsageError: `nproc` does not fit the hosts.

    Attributes:
        names: names of the hosts, in the order of the ranks.
        broadcasts: whether the standard input of the process that `_step` returns goes to all
            agents.
        unusable: key of the error for nodes that cannot be used.
    """

    broadcasts: bool = False
    unusable: str = "HT210.nodes-unusable"

    def __init__(
        self, counts: Mapping[str, int], nproc: str | None, inside: Inside | None = None
    ) -> None:
        self.names: Sequence[str] = list(counts)
        ranks: Sequence[int] = list(counts.values())
        if nproc is not None:
            none = [0] * len(counts)
            ranks = none if nproc == "auto" else rank_environment.layout(nproc, none)
        self._counts = dict(zip(counts, ranks, strict=True))
        self._inside = inside or Inside()
        self._standby: Standby | None = None
        self._ending: list[Standby] = []

    def ranks(self, host: str) -> int:
        """Return the number of ranks of a host; 1 if its agent decides."""
        return self._counts.get(host) or 1

    @abstractmethod
    def present(self) -> list[str]:
        """Return the hosts that can be used, in order; no rank of an earlier attempt runs there."""

    def answers(self, host: str) -> bool:
        """Check whether a host that did not answer another one answers this process."""
        return False

    def run(
        self,
        hosts: Sequence[str],
        attempt: Attempt,
        following: Attempt | None = None,
        spares: Sequence[str] = (),
    ) -> HostsEnd:
        """Start the ranks on these hosts, and wait until they have ended.

        Args:
            hosts: names of the hosts.
            attempt: this attempt.
            following: the next one, whose ranks may be started meanwhile, to wait; None if there
                will be none.
            spares: names of other hosts, on which the ranks of the next one wait, too.
        """
        standby, self._standby = self._standby, None
        if standby is not None and standby.begin(hosts):
            attempt = replace(attempt, folder=standby.folder)
        elif standby is not None:
            standby.end()
            self._ending.append(standby)
            standby = None
        stop_file = _stop_file(attempt)
        if attempt.stopping:
            stop_file.touch()
        step = standby.step if standby else self._step(hosts, attempt, _environ(attempt))
        command, environ, exit_status_file = step
        events: supervisor.Events = queue.SimpleQueue()

        def forward(number: int) -> str:
            # A signal to the starter could end the agents at once. All ranks see a stop file, also
            # those of a program that has removed its run directory.
            stop_file.parent.mkdir(parents=True, exist_ok=True)
            stop_file.touch()
            if failure_record.sessions(attempt.folder):
                return "stops the run, which saves first"
            if number in (signal.SIGUSR1, signal.SIGUSR2) and not attempt.ends_plain:
                return "stops the run as soon as its Session is open"
            events.put(number)
            return "ends the ranks, which have no Session"

        waits_on = [host for host in self.names if host in {*hosts, *spares}]
        prepare = self._preparation(waits_on, attempt, following)
        ends = Ends(attempt.folder, len(hosts), bool(standby and len(standby.hosts) > len(hosts)))

        def meanwhile() -> None:
            if ends.overdue():
                events.put(signal.SIGKILL)
            else:
                prepare()

        outcome = supervisor.run(
            command,
            {0: environ},
            exit_status_file,
            labelled=False,
            events=events,
            temporary=False,
            forward=forward,
            started=Started(standby.server, [standby.rank]) if standby else None,
            meanwhile=meanwhile,
        )
        end = self._end(attempt.folder, outcome)
        if standby is not None:
            end = replace(end, folder=attempt.folder)
        if not ends.given_up:
            return end
        silent = [host for index, host in enumerate(hosts) if index not in ends.known()]
        if not silent and end.first is None:
            end = replace(end, code=ends.code())  # not that of the killed launcher
        return replace(end, suspects=tuple(sorted({*end.suspects, *silent})))

    def close(self) -> None:
        """End the ranks that wait for an attempt."""
        if self._standby is not None:
            self._standby.end()
            self._ending.append(self._standby)
            self._standby = None
        for standby in self._ending:
            standby.wait()
        self._ending.clear()

    def _preparation(
        self, hosts: Sequence[str], attempt: Attempt, following: Attempt | None
    ) -> Callable[[], None]:
        """Return a part of `meanwhile` that starts ranks for the following attempt.

        Those in a container, or of a folder that each host has copied, are not started early.
        """
        copied = self._inside.container or any(self._inside.staging)
        if following is None or not self.broadcasts or copied:
            return lambda: None
        wait = _SECONDS_IN_LATER_ATTEMPTS if attempt.number else _SECONDS_BEFORE_STANDBY
        seconds = 0.0  # since rank 0 was seen to have a session

        def prepare() -> None:
            nonlocal seconds
            if seconds or failure_record.is_open(attempt.folder):
                seconds += supervisor.SECONDS_BETWEEN_CALLS
            if seconds != wait:
                return
            modules = failure_record.modules(attempt.folder)
            words = command_that_waits(attempt.command, modules)
            if words is None:
                return
            waiting = replace(following, command=words, waits=True)
            with contextlib.suppress(OSError, StartError):  # then the attempt starts as the first
                following.folder.mkdir(mode=0o700)
                step = self._step(hosts, waiting, _environ(waiting))
                self._standby = Standby.start(hosts, following.folder, step)

        return prepare

    @abstractmethod
    def _step(self, hosts: Sequence[str], attempt: Attempt, environ: dict[str, str]) -> Step:
        """Return command, environment and exit status file of the process to start."""

    def _plan(self, hosts: Sequence[str], attempt: Attempt) -> str:
        """Return the plan of the agents as JSON."""
        counts = [str(self._counts[host]) for host in hosts if self._counts[host]]
        plan = Plan(
            attempt.command,
            ",".join(counts) or "auto",
            str(attempt.folder),
            attempt.launch,
            attempt.number,
            staging=self._inside.staging,
            container=self._inside.container,
            label=self._inside.label,
            waits=attempt.waits,
        )
        return json.dumps(asdict(plan))

    def _end(self, folder: Path, outcome: supervisor.Outcome) -> HostsEnd:
        return read_ends(folder, outcome.code, outcome.signal is not None)


def _stop_file(attempt: Attempt) -> Path:
    return attempt.folder / "stop"


def _environ(attempt: Attempt) -> dict[str, str]:
    """Return the environment of the agents of an attempt."""
    return {
        **attempt.environ,
        env_vars.STOP_FILE: str(_stop_file(attempt)),
        env_vars.START: f"{attempt.launch}/{attempt.number}",
    }
