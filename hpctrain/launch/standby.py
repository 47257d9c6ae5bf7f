"""Ranks of the next attempt, which wait with their imports done while those of this one train.

After a failure they begin without the seconds in which Slurm makes a step, the agents find each
other, and Python imports torch. They also wait on the spare hosts, as any host may be lost. The
attempt begins when the agents can read the names of its hosts from their standard input, which is
the same for all of them. Each tells its ranks their environment, on their standard input
(`standby_rank`). An input that ends without a whole line means that they are not needed:

    hpctrain run → agents    ["node1", "node3", …]
    agent → rank             {"RANK": "0", "WORLD_SIZE": …}
"""

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch import supervisor
from hpctrain.launch.rank_processes import ForkServer, Rank

__all__ = ["Standby", "Step", "command_that_waits"]

_SECONDS_TO_END = 5.0

Step = tuple[list[str], dict[str, str], Path]


def command_that_waits(words: Sequence[str], modules: Sequence[str]) -> list[str] | None:
    """Return the command of a rank that waits; None for a program that is not Python's.

    Args:
        words: command of the rank: Python, then a script or `-m MODULE`, and its arguments.
        modules: modules to import before.
    """
    python, *rest = words
    first = rest[1:] if rest[:1] == ["-P"] else rest
    if not os.path.basename(python).startswith("python") or not first:
        return None
    if first[0].startswith("-") and first[0] != "-m":
        return None
    return [python, "-P", "-m", "hpctrain.launch.standby_rank", ",".join(modules), *rest]


@dataclass(frozen=True, slots=True)
class Standby:
    """A started attempt whose ranks wait.

    Attributes:
        hosts: names of its hosts.
        folder: folder of the attempt.
        step: command, environment and exit status file of the process that starts the agents.
        server: server that has started that process.
        rank: that process.
    """

    hosts: Sequence[str]
    folder: Path
    step: Step
    server: ForkServer
    rank: Rank

    @classmethod
    def start(cls, hosts: Sequence[str], folder: Path, step: Step) -> "Standby":
        """Start the agents and their ranks.

        Args:
            hosts, folder, step: see the attributes.

        Raises:
            StartError: the system cannot start another process.
        """
        command, environ, exit_status_file = step
        own = supervisor.with_files(environ, exit_status_file)
        server = ForkServer(None)
        rank = server.start(0, command, own, listens=True)
        return cls(list(hosts), folder, step, server, rank)

    def begin(self, hosts: Sequence[str]) -> bool:
        """Let the ranks begin; return whether they run, and on these hosts."""
        # The first host has to be the same, as the agents have met there.
        fits = hosts[0] == self.hosts[0] and set(hosts) <= set(self.hosts)
        if not fits or not self.rank.runs():
            return False
        assert self.rank.stdin is not None
        try:
            self.rank.stdin.write(f"{json.dumps(list(hosts))}\n".encode())
            self.rank.stdin.close()
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Let the ranks end, which are not needed; srun may wait for a lost host meanwhile."""
        assert self.rank.stdin is not None
        with contextlib.suppress(OSError):
            self.rank.stdin.close()
        self.rank.signal(signal.SIGTERM, everything=False)

    def wait(self) -> None:
        """Wait for the end of the ranks, up to five seconds."""
        self.rank.runs(_SECONDS_TO_END)
        self.server.end()
        self.rank.close()
