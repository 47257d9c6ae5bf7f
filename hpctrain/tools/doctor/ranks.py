"""Checks over the ranks of a start: rendezvous, table, differences, and test sums."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import backends, rendezvous
from hpctrain.cluster.launchers import Start
from hpctrain.cluster.texts import printable
from hpctrain.errors import HpctrainError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Answer, Rendezvous, Roster
from hpctrain.tools.doctor import storage
from hpctrain.tools.doctor.machine import Machine
from hpctrain.tools.doctor.report import Finding, Report, merged, problem, to_send, warning

if TYPE_CHECKING:
    import torch

    from hpctrain.backends.base import Backend

__all__ = ["checked", "clock_findings", "examine", "rows", "shared_findings"]

# Timeout of a collective: the checks take less, even over a slow network.
_COLLECTIVE_SECONDS = 120.0
_CLOCK_SECONDS = 2.0
_CHECKED = (1, 1000, 100_003)  # elements; 2, 4, 8 … ranks cannot share the last evenly
_NOT_TRIED = warning(
    "all-reduce",
    "not tried, run directories and clocks not compared: not all ranks could take part",
    "ranks without problems, with devices of one kind",
    "fix the other problems first",
)
_NO_SUM = (
    "look for a firewall between the hosts",
    "export HPCTRAIN_INTERFACE=NAME, if the ranks use a wrong interface",
    "export NCCL_DEBUG=INFO, for the messages of NCCL",
)


def examine(report: Report, own: Machine, start: Start, run: Path, timeout: float) -> int:
    """Check all ranks, complete the report, and return an exit code.

    Args:
        report: report of this rank; only that of rank 0 is printed.
        own: findings and facts of this rank about its own machine.
        start: start of this process.
        run: run directory.
        timeout: seconds to wait for all ranks.

    Raises:
        HpctrainError: the rendezvous failed, this is not rank 0, and rank 0 did not report it.
    """
    rank = start.world.rank
    with storage.marker(run) if rank == 0 else nullcontext("") as marker:
        try:
            met = _meet(start, own, run, marker, timeout)
        except HpctrainError as error:
            if rank != 0 and not error.reported_by_rank_0:
                raise
            report.machines([*own.findings, Finding.of("start", error)])
            report.end()
            return error.exit_code
        if rank == 0:
            of_all = merged([entry["doctor"]["findings"] for entry in met.roster.entries])
            report.machines([*of_all, *_differences(met.roster)], rows(met.roster))
        if own.device is not None and met.shared["communicate"]:
            _check_sums(report, met, own.device, run, timeout)
        else:
            if met.listener is not None:
                met.listener.close()
            report.add([_NOT_TRIED])
        return report.end()


def _meet(start: Start, own: Machine, run: Path, marker: str, timeout: float) -> Rendezvous:
    """Meet the other ranks as the Session does, but refuse no rank for its findings."""
    point = start.rendezvous_point
    return rendezvous.meet(
        start.world,
        point,
        _entry(own, run, marker),
        timeout,
        logger.info if start.world.rank == 0 else logger.warning,
        store=backends.agent_store(point, timeout) if own.has_torch else None,
        folder=run,
        check=_decide,
    )


def _decide(roster: Roster) -> Answer:
    """Return what all ranks have to know of the others: rank 0 has their entries, and prints."""
    refused = any(finding.level == "problem" for finding in _differences(roster))
    facts = [entry["doctor"] for entry in roster.entries]
    alike = len({one["kind"] for one in facts}) == 1
    return Answer(shared={"communicate": alike and not refused, "marker": facts[0]["marker"]})


def _entry(own: Machine, run: Path, marker: str) -> dict[str, Any]:
    """Return the entry that this rank sends to the others at the rendezvous."""
    values: dict[str, Any] = {}
    if own.device is not None:
        from hpctrain.rendezvous import consistency

        values = consistency.entry(own.device, {})
    kind = own.device.type if own.device is not None else "none"
    facts = {"findings": to_send(own.findings), "run": str(run), "marker": marker, "kind": kind}
    return {**values, "doctor": facts}


def rows(roster: Roster) -> list[dict[str, Any]]:
    """Return host and device of each rank, as JSON values."""
    return [
        {
            "rank": rank,
            "host": roster.host(rank),
            "local_rank": entry["world"]["local_rank"],
            "device": entry.get("gpu_name") or entry["doctor"]["kind"],
            "gpu": entry.get("gpu"),
        }
        for rank, entry in enumerate(roster.entries)
    ]


def _differences(roster: Roster) -> list[Finding]:
    """Return what the consistency check finds between the ranks."""
    # A rank without torch or a device sends no versions, and has a finding of its own.
    if not all(entry.get("versions") for entry in roster.entries):
        return []
    from hpctrain.rendezvous import consistency

    return [
        Finding.of(difference.subject, difference.error, difference.wrong)
        for difference in consistency.differences(roster.entries, roster.host_names)
    ]


def _check_sums(
    report: Report, met: Rendezvous, device: "torch.device", run: Path, timeout: float
) -> None:
    """Compute sums over the ranks, and compare the run directories; add both to the report."""
    world = met.world
    marker = met.shared["marker"]
    backend = None
    try:
        backend = backends.open_backend(
            backends.choose("auto", world.world_size),
            met,
            device,
            backends.BackendSettings(_COLLECTIVE_SECONDS, timeout),
        )
        found = bool(marker) and storage.finds(run, marker)
        # Run every check, even after a wrong sum: each sum needs all ranks.
        exact = [checked(backend, count) for count in _CHECKED]
        # All ranks leave the last sum within milliseconds.
        seen = backend.gather_object((found, time.time(), all(exact)))
        if world.rank == 0:
            shared, clocks, right = zip(*seen, strict=True)
            report.sums(backend.transport, [rank for rank, one in enumerate(right) if not one])
            report.add([*clock_findings(clocks), *shared_findings(met.roster, shared)])
        # No rank closes the backend while another rank still uses it.
        backend.barrier()
        backend.close()
    except (HpctrainError, RuntimeError) as error:
        finding = _failed(error)
        if world.rank != 0:
            logger.error("%s", finding.found)
        report.add([finding])
        if backend is not None:
            backend.close(finding.found)


def _failed(error: HpctrainError | RuntimeError) -> Finding:
    """Return the finding for an error in a sum."""
    if isinstance(error, HpctrainError):
        return Finding.of("all-reduce", error)
    found = f"the ranks cannot compute a sum: {printable(' '.join(str(error).split()))}"
    return problem("all-reduce", found, "a sum over all ranks", *_NO_SUM)


def checked(backend: "Backend", count: int) -> bool:
    """Check whether a sum of whole numbers that differ between ranks is exact on this rank."""
    import torch

    pattern = torch.arange(count, dtype=torch.float64, device=backend.device) % 1009 + 1
    total = backend.world_size * (backend.world_size + 1) // 2
    return bool(torch.equal(backend.sum(pattern * (backend.rank + 1)), pattern * total))


def clock_findings(clocks: Sequence[float]) -> list[Finding]:
    """Return a warning where clocks are not those of rank 0.

    `hpctrain run` finds by them which of several hosts failed first.

    Args:
        clocks: time of each rank in seconds, at nearly the same moment.
    """
    ahead = {rank: clock - clocks[0] for rank, clock in enumerate(clocks)}
    wrong = [rank for rank, seconds in ahead.items() if abs(seconds) > _CLOCK_SECONDS]
    if not wrong:
        return []
    most = max((ahead[rank] for rank in wrong), key=abs)
    found = f"up to {abs(most):.0f} s {'ahead of' if most > 0 else 'behind'} rank 0's"
    expected = "clocks that agree: they decide which rank failed first"
    fixes = "as root, there: chronyc makestep", "as root, there: timedatectl set-ntp true"
    return [warning("clocks", found, expected, *fixes, ranks=wrong)]


def shared_findings(roster: Roster, found: Sequence[float]) -> list[Finding]:
    """Return a finding where ranks have another run directory; none without rank 0's file.

    Args:
        roster: all ranks.
        found: for each rank, whether it found the file of rank 0.
    """
    facts = [entry["doctor"] for entry in roster.entries]
    without = [rank for rank, there in enumerate(found) if not there]
    if not facts[0]["marker"] or not without:
        return []
    path, theirs = printable(facts[0]["run"]), printable(facts[without[0]]["run"])
    wrong = f"a file that rank 0 created in {path} is missing"
    wrong += "" if theirs == path else f"; the run directory there is {theirs}"
    expected = "one directory on a file system that all hosts share"
    fixes = "--run-dir DIR, an absolute path", "export HPCTRAIN_RUN_DIR=DIR, with such a path"
    return [problem("shared directory", wrong, expected, *fixes, ranks=without)]
