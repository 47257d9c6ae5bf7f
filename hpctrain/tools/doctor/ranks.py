"""The whole examination: this machine, and then the ranks of a launch and sums over them."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import backends, rendezvous
from hpctrain.cluster import env_vars, launchers
from hpctrain.errors import HpctrainError
from hpctrain.process import logging
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Answer, Rendezvous, Roster
from hpctrain.tools.doctor import machine, storage
from hpctrain.tools.doctor.report import Finding, Report, finding, merged

if TYPE_CHECKING:
    import torch

    from hpctrain.backends.base import Backend

# Timeout of a collective: the checks take less, even over a slow network.
_COLLECTIVE_SECONDS = 120.0
_CLOCK_SECONDS = 2.0
_CHECKED = (1, 1000, 100_003)  # elements; 2, 4, 8 … ranks cannot share the last evenly


def examine(run: str | None, timeout: float, as_json: bool) -> int:
    """Run all checks, print the report at rank 0, and return an exit code.

    Args:
        run: run directory from the command line; None for the default.
        timeout: seconds to wait for all ranks.
        as_json: whether to print one JSON object instead of text.

    Returns:
        1 where rank 0 reports a problem, or the rendezvous fails; else 0.

    Raises:
        UsageError: the environment contradicts itself, or this process is not a separate rank.
        StartError: the rendezvous failed, and this is not rank 0.
    """
    start = launchers.survey()
    world, point = start.world, start.rendezvous_point
    logging.setup_logging(world.rank)
    if start.stray:
        raise start.stray
    directory = Path(run or os.environ.get(env_vars.RUN_DIR) or "runs").absolute()
    with ExitStack() as undo:
        facts, findings, device = machine.examine(start, directory, undo)
        report = Report(facts, world, as_json)
        marker = "" if world.rank else storage.marker(directory, undo)
        entry = _entry(findings, device, directory, marker)
        announce = logger.warning if world.rank else logger.info
        try:
            # As in the Session, but no rank is refused for its findings.
            store = backends.agent_store(point, timeout) if "torch" in sys.modules else None
            met = rendezvous.meet(
                world, point, entry, timeout, announce, check=_decide, store=store, folder=directory
            )
        except HpctrainError as error:
            if world.rank and not error.reported_by_rank_0:
                raise
            report.machines([*merged([entry["doctor"]["findings"]]), Finding.of("start", error)])
            report.end()
            return 1
        if world.rank == 0:
            of_all = merged([one["doctor"]["findings"] for one in met.roster.entries])
            report.machines([*of_all, *_differences(met.roster)], rows(met.roster))
        if device is not None and met.shared["communicate"]:
            _check_sums(report, met, device, directory, timeout)
        elif world.world_size > 1:
            report.add([finding("all-reduce.not-tried")])
        return report.end()


def _decide(roster: Roster) -> Answer:
    """Return what all ranks have to know of the others: rank 0 has their entries, and prints."""
    refused = any(one.level == "problem" for one in _differences(roster))
    facts = [entry["doctor"] for entry in roster.entries]
    ready = not refused and len(facts) > 1 and len({one["kind"] for one in facts}) == 1
    return Answer(shared={"communicate": ready, "marker": facts[0]["marker"]})


def _entry(
    findings: Sequence[Finding], device: "torch.device | None", run: Path, marker: str
) -> dict[str, Any]:
    """Return the entry that this rank sends to the others at the rendezvous."""
    facts = {"findings": [*map(asdict, findings)], "run": str(run), "marker": marker}
    if device is None:
        return {"doctor": {**facts, "kind": "none"}}
    from hpctrain.rendezvous import consistency

    return {**consistency.entry(device, {}), "doctor": {**facts, "kind": device.type}}


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

    found = consistency.differences(roster.entries, roster.host_names)
    return [Finding.of(o.subject, o.error, "problem" if o.wrong else "warning") for o in found]


def _check_sums(
    report: Report, met: Rendezvous, device: "torch.device", run: Path, timeout: float
) -> None:
    """Compute sums over the ranks, and compare the run directories; add both to the report."""
    rank, backend = met.world.rank, None
    try:
        settings = backends.BackendSettings(_COLLECTIVE_SECONDS, timeout)
        backend = backends.open_backend("ddp", met, device, settings)
        found = storage.finds(run, met.shared["marker"])
        # Run every check, even after a wrong sum: each sum needs all ranks.
        exact = [checked(backend, count) for count in _CHECKED]
        # All ranks leave the last sum within milliseconds.
        seen = backend.gather_object((found, time.time(), all(exact)))
        if rank == 0:
            shared, clocks, right = zip(*seen, strict=True)
            report.sums(backend.transport, [rank for rank, one in enumerate(right) if not one])
            report.add([*clock_findings(clocks), *shared_findings(met.roster, shared)])
        # No rank closes the backend while another rank still uses it.
        backend.barrier()
        backend.close()
    except (HpctrainError, RuntimeError) as error:
        failed = finding("all-reduce.fails", error=" ".join(str(error).split()))
        if isinstance(error, HpctrainError):
            failed = Finding.of("all-reduce", error)
        if rank != 0:
            logger.error("%s", failed.found)
        report.add([failed])
        if backend is not None:
            backend.close(failed.found)


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
    ahead = [clock - clocks[0] for clock in clocks]
    wrong = [rank for rank, seconds in enumerate(ahead) if abs(seconds) > _CLOCK_SECONDS]
    return [finding("clocks.differ", wrong, seconds=max(ahead, key=abs))] if wrong else []


def shared_findings(roster: Roster, found: Sequence[bool]) -> list[Finding]:
    """Return a finding where ranks have another run directory; none without rank 0's file.

    Args:
        roster: all ranks.
        found: for each rank, whether it found the file of rank 0.
    """
    facts = [entry["doctor"] for entry in roster.entries]
    without = [rank for rank, there in enumerate(found) if not there]
    if not facts[0]["marker"] or not without:
        return []
    path, local_path = facts[0]["run"], facts[without[0]]["run"]
    return [finding("shared directory.missing", without, path=path, local_path=local_path)]
