"""Choice of the hosts of each attempt among those of the job."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.job import detect as detect_job
from hpctrain.launch.job_hosts import HostsEnd, JobHosts
from hpctrain.rundir import host_ledger

__all__ = ["HostChoice"]

# Errors of a rank of which its host is the cause.
_WRONG_NUMBERS = "HT318"
_OTHER_WEIGHTS = "HT623"


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
        lost: names of the hosts of the attempt before that cannot be used any more.
    """

    def __init__(
        self, hosts: JobHosts, present: Sequence[str], spares: int, env: Mapping[str, str]
    ) -> None:
        job = detect_job(env)
        self._hosts, self._job = hosts, job.label if job else ""
        self._top = Path(env.get("SLURM_SUBMIT_DIR") or os.getcwd())
        self._silent: set[str] = set()  # hosts that did not answer when last asked
        self._unfit: set[str] = set()
        self.wanted = len(hosts.names) - spares
        self.used = _best(present, self.wanted, host_ledger.avoided(self._top))
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

    def _note(self, hosts: set[str], kind: str) -> None:
        host_ledger.note(self._top, sorted(hosts), kind, self._job)


def _best(hosts: Sequence[str], wanted: int, avoided: Sequence[str]) -> list[str]:
    """Return some of the hosts in their order; those to avoid only if there are no others."""
    best = sorted(hosts, key=lambda host: host in avoided)[:wanted]
    return [host for host in hosts if host in best]
