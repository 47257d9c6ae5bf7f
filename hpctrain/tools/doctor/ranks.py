"""Checks over the ranks of a start: rendezvous, table, differences, and test sums."""

import os
import platform
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import backends, rendezvous
from hpctrain._version import __version__
from hpctrain.cluster import visible_gpus
from hpctrain.cluster.launchers import Start
from hpctrain.cluster.texts import printable
from hpctrain.errors import HpctrainError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Answer, Rendezvous, Roster, interfaces
from hpctrain.tools.doctor import storage
from hpctrain.tools.doctor.findings import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    merged,
    to_send,
    worst_last,
)
from hpctrain.tools.doctor.machine import Machine
from hpctrain.tools.doctor.report import Report

if TYPE_CHECKING:
    import torch

__all__ = ["VALUES", "examine", "judge_clocks", "judge_shared", "judge_sums", "rows"]

# Timeout of a collective: the checks take less, even over a slow network.
_COLLECTIVE_SECONDS = 120.0
_CLOCK_SECONDS = 2.0
# Values of a rank in the table, beside its place from the rendezvous.
VALUES = ("gpu", "device", "visible", "cores", "threads", "torch", "python", "hpctrain")
_NOT_TRIED = Finding(
    "all-reduce",
    WARNING,
    "not tried, run directories and clocks not compared: not all ranks could take part",
    "ranks without problems, with devices of one kind",
    ("fix the other problems first",),
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
            report.machines([*worst_last(own.findings), Finding.of("start", error)])
            report.end()
            return error.exit_code
        if rank == 0:
            table = rows(met.roster)
            passed = [finding for finding in own.findings if finding.level == OK]
            of_all = merged([entry["doctor"]["findings"] for entry in met.roster.entries])
            report.machines([*passed, *of_all], [row["host"] for row in table])
            report.table(table, _differences(met.roster))
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
        store=backends.agent_store(point, timeout) if own.torch_version else None,
        folder=run,
        check=_decide,
    )


def _decide(roster: Roster) -> Answer:
    """Return what all ranks have to know of the others: rank 0 has their entries, and prints."""
    wrong = any(finding.level == PROBLEM for finding in _differences(roster))
    kinds = {entry["doctor"]["kind"] for entry in roster.entries}
    return Answer(
        shared={
            "communicate": len(kinds) == 1 and not wrong,
            "marker": roster.entries[0]["doctor"]["marker"],
        }
    )


def _entry(own: Machine, run: Path, marker: str) -> dict[str, Any]:
    """Return the entry that this rank sends to the others at the rendezvous."""
    values: dict[str, Any] = {}
    if own.device is not None:
        from hpctrain.rendezvous import consistency

        values = consistency.entry(own.device, {})
    kind = own.device.type if own.device is not None else None
    shown = visible_gpus.visible(os.environ)
    threads = os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")
    return {
        **values,
        "doctor": {
            "findings": to_send(own.findings),
            "run": str(run),
            "marker": marker,
            "interfaces": interfaces.addresses(),
            "kind": kind,
            "gpu": values.get("gpu"),
            "device": values.get("gpu_name") or kind or "none",
            "visible": ",".join(shown.names) or "hidden" if shown else "all",
            "cores": str(len(os.sched_getaffinity(0))),
            "threads": threads or "not set",
            "torch": own.torch_version or "none",
            "python": platform.python_version(),
            "hpctrain": __version__,
        },
    }


def rows(roster: Roster) -> list[dict[str, Any]]:
    """Return the table of all ranks, a row for each, with JSON values."""
    table = []
    for rank, (entry, address) in enumerate(zip(roster.entries, roster.addresses, strict=True)):
        facts = entry["doctor"]
        with_address = (name for name, own in facts["interfaces"].items() if address in own)
        place = {
            "rank": rank,
            "host": roster.host(rank),
            "local_rank": entry["world"]["local_rank"],
            "pid": entry["pid"],
            "address": address,
            "interface": next(with_address, None),
        }
        table.append(place | {name: facts[name] for name in VALUES})
    return table


def _differences(roster: Roster) -> list[Finding]:
    """Return what the consistency check finds between the ranks, problems last."""
    # A rank without torch or a device sends no versions, and has a finding of its own.
    if not all(entry.get("versions") for entry in roster.entries):
        return []
    from hpctrain.rendezvous import consistency

    return worst_last(
        Finding.of(difference.subject, difference, PROBLEM if difference.wrong else WARNING)
        for difference in consistency.differences(roster.entries, roster.host_names)
    )


def _check_sums(
    report: Report, met: Rendezvous, device: "torch.device", run: Path, timeout: float
) -> None:
    """Compute sums over the ranks, and compare the run directories; add both to the report."""
    from hpctrain.tools.doctor import communication

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
        sums = communication.run_sums(backend)
        # All ranks leave the last sum within milliseconds.
        seen = backend.gather_object((found, time.time(), *sums))
        if world.rank == 0:
            shared, clocks, exact, speeds = zip(*seen, strict=True)
            wrong = [rank for rank, right in enumerate(exact) if not right]
            slowest = {size: min(own[size] for own in speeds) for size in speeds[0]}
            report.sums(backend.transport, wrong, slowest)
            report.add([judge_sums(backend.transport, wrong)])
            report.add([*judge_clocks(clocks), *judge_shared(met.roster, shared)])
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
    return Finding("all-reduce", PROBLEM, found, "a sum over all ranks", _NO_SUM)


def judge_sums(transport: str, wrong: Sequence[int]) -> Finding:
    """Return a finding on whether the sums were exact.

    Args:
        transport: library that carried the data.
        wrong: ranks where a sum was not exact.
    """
    if not wrong:
        return Finding("all-reduce", OK, f"exact sums at all ranks over {transport}")
    return Finding(
        "all-reduce",
        PROBLEM,
        f"a wrong sum over {transport}",
        "exact sums, or training computes wrong gradients",
        ("srun --exclude=HOSTS, and report the hosts of these ranks to the administrators",),
        ranks=tuple(wrong),
    )


def judge_clocks(clocks: Sequence[float]) -> list[Finding]:
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
    fixes = ("as root, there: chronyc makestep", "as root, there: timedatectl set-ntp true")
    return [Finding("clocks", WARNING, found, expected, fixes, ranks=tuple(wrong))]


def judge_shared(roster: Roster, found: Sequence[float]) -> list[Finding]:
    """Return a finding on whether all ranks have the same run directory.

    Args:
        roster: all ranks.
        found: for each rank, whether it found the file of rank 0.

    Returns:
        No finding where rank 0 could not create the file.
    """
    facts = [entry["doctor"] for entry in roster.entries]
    if not facts[0]["marker"]:
        return []
    without = [rank for rank, there in enumerate(found) if not there]
    subject, path = "shared directory", printable(facts[0]["run"])
    if not without:
        hosts = f"{len(roster.hosts)} host{'s' if len(roster.hosts) > 1 else ''}"
        return [Finding(subject, OK, f"all ranks on {hosts} have the same {path}")]
    theirs = printable(facts[without[0]]["run"])
    other = "" if theirs == path else f"; the run directory there is {theirs}"
    return [
        Finding(
            subject,
            PROBLEM,
            f"a file that rank 0 created in {path} is missing{other}",
            "one directory on a file system that all hosts share",
            ("--run-dir DIR, an absolute path", "export HPCTRAIN_RUN_DIR=DIR, with such a path"),
            ranks=tuple(without),
        )
    ]
