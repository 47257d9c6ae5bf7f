"""Hosts of a scheduler's job: an agent on each starts the ranks there."""

import json
import queue
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.launch import supervisor
from hpctrain.launch.agent import Plan
from hpctrain.launch.hosts import Attempt, HostsEnd, read_ends
from hpctrain.process import failure_record

__all__ = ["Inside", "JobHosts"]


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
        inside: what surrounds the ranks.
    """

    def __init__(self, counts: Mapping[str, int], inside: Inside | None = None) -> None:
        self.names: Sequence[str] = list(counts)
        self._counts = counts
        self._inside = inside or Inside()

    def ranks(self, host: str) -> int:
        """Return the number of ranks of a host; 1 if its agent decides."""
        return self._counts.get(host) or 1

    @abstractmethod
    def present(self, launch: str) -> list[str]:
        """Return the hosts that can be used; see `Hosts`."""

    @abstractmethod
    def fixes(self, host: str) -> Sequence[str]:
        """Return what to type if a host cannot be used."""

    def run(self, hosts: Sequence[str], attempt: Attempt) -> HostsEnd:
        """Start the ranks, and wait until they have ended."""
        stop_file = attempt.folder / "stop"
        start = f"{attempt.launch}/{attempt.number}"
        environ = {**attempt.environ, env_vars.STOP_FILE: str(stop_file), env_vars.START: start}
        if attempt.stopping:
            stop_file.touch()
        command, environ, exit_status_file = self._step(hosts, attempt, environ)
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

        outcome = supervisor.run(
            command,
            {0: environ},
            exit_status_file,
            labelled=False,
            events=events,
            temporary=False,
            forward=forward,
        )
        return self._end(attempt.folder, outcome)

    @abstractmethod
    def _step(
        self, hosts: Sequence[str], attempt: Attempt, environ: dict[str, str]
    ) -> tuple[list[str], dict[str, str], Path]:
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
        )
        return json.dumps(asdict(plan))

    def _end(self, folder: Path, outcome: supervisor.Outcome) -> HostsEnd:
        return read_ends(folder, outcome.code, outcome.signal is not None)
