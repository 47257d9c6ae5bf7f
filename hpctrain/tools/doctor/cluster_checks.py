"""Checks across the ranks of a start: rendezvous, differences between ranks, and collectives."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import backends, rendezvous
from hpctrain._version import __version__
from hpctrain.cluster import visible_gpus
from hpctrain.cluster.launchers import Start
from hpctrain.errors import HpctrainError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Rendezvous
from hpctrain.tools.doctor import ranks
from hpctrain.tools.doctor.findings import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    merged,
    plain,
    to_tell,
    worst_last,
)
from hpctrain.tools.doctor.machine import Machine
from hpctrain.tools.doctor.output import Report

if TYPE_CHECKING:
    import torch

    from hpctrain.backends.base import Backend

__all__ = ["examine"]

# Timeout of a collective: the checks take less, even over a slow network.
_COLLECTIVE_SECONDS = 120.0
_NOT_TRIED = Finding(
    "all-reduce",
    WARNING,
    "not tried, nor clocks and run directory compared: not all ranks could take part",
    ("mend the rest first",),
)
_NO_SUM = (
    "look for a firewall between the hosts",
    "export HPCTRAIN_INTERFACE=NAME, where the ranks use a wrong interface",
    "export NCCL_DEBUG=INFO, for the messages of NCCL",
)


def examine(
    report: Report,
    own: Machine,
    start: Start,
    run: Path,
    timeout: float,
    env: Mapping[str, str],
) -> int:
    """Check all ranks, complete the report, and return an exit code.

    Args:
        report: report of this rank; only that of rank 0 is printed.
        own: findings and facts of this rank about its own machine.
        start: start of this process.
        run: run directory.
        timeout: seconds to wait for all ranks.
        env: environment variables.

    Raises:
        HpctrainError: the rendezvous failed, this is not rank 0, and rank 0 did not report it.
    """
    rank = start.world.rank
    with ranks.token(rank, run) as left:
        try:
            met = _meet(start, own, _entry(own, left, env), run, timeout)
        except HpctrainError as error:
            if rank != 0 and not error.told_by_rank_0:
                raise
            found = Finding("start", PROBLEM, error.found, error.fixes, (rank,))
            report.tell([*worst_last(own.findings), found])
            report.end()
            return error.exit_code
        told = merged([entry["doctor"]["findings"] for entry in met.roster.entries])
        table = ranks.rows(met.roster)
        well = [one for one in own.findings if one.level == OK]
        report.tell([*well, *told], [row.host for row in table])
        unlike = _differences(met, table)
        wrong = any(one.level == PROBLEM for one in unlike)
        if own.device is not None and _can_talk(met) and not wrong:
            return _talk(report, met, own.device, run, table, unlike, timeout)
        if met.listener is not None:
            met.listener.close()
        report.table(table, [_NOT_TRIED, *unlike])
        return report.end()


def _meet(
    start: Start, own: Machine, entry: dict[str, Any], run: Path, timeout: float
) -> Rendezvous:
    """Meet the other ranks as the Session does, but refuse no rank for its findings."""
    point = start.rendezvous_point
    return rendezvous.meet(
        start.world,
        point,
        entry,
        timeout,
        logger.info if start.world.rank == 0 else logger.warning,
        store=backends.agent_store(point, timeout) if own.torch_version else None,
        folder=run,
    )


def _entry(own: Machine, left: Mapping[str, str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry that this rank sends to the others at the rendezvous."""
    said: dict[str, Any] = {}
    if own.device is not None:
        from hpctrain.rendezvous import consistency

        said = consistency.entry(own.device, {})
    shown = visible_gpus.visible(env)
    return {
        **said,
        "doctor": {
            **left,
            "findings": to_tell(own.findings),
            "kind": own.device.type if own.device is not None else None,
            "gpu": said.get("gpu"),
            "device": said.get("gpu_name") or (own.device.type if own.device else ranks.NONE),
            "visible": ",".join(shown.names) or "hidden" if shown else "all",
            "cores": str(own.cores),
            "mask": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
            "threads": env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS") or "not set",
            "torch": own.torch_version or ranks.NONE,
            "python": platform.python_version(),
            "hpctrain": __version__,
        },
    }


def _can_talk(met: Rendezvous) -> bool:
    """Return whether all ranks have a device, and all devices are of one kind."""
    kinds = {entry["doctor"]["kind"] for entry in met.roster.entries}
    return None not in kinds and len(kinds) == 1


def _differences(met: Rendezvous, table: Sequence[ranks.Row]) -> list[Finding]:
    """Return the differences between the ranks, problems last."""
    entries = met.roster.entries
    found = []
    # A rank without torch sends no versions.
    if all(entry.get("versions") for entry in entries):
        from hpctrain.rendezvous import consistency

        hosts = [row.host for row in table]
        found = [
            Finding(one.subject, PROBLEM if one.wrong else WARNING, plain(one.found), one.fixes)
            for one in consistency.differences(entries, hosts)
        ]
    subjects = {one.subject for one in found}
    found += [one for one in ranks.differences(table) if one.subject not in subjects]
    return worst_last([*found, *ranks.judge_cores(entries, table)])


def _talk(
    report: Report,
    met: Rendezvous,
    device: "torch.device",
    run: Path,
    table: Sequence[ranks.Row],
    unlike: Sequence[Finding],
    timeout: float,
) -> int:
    """Check clocks, run directory, sums and transfers between hosts; return an exit code."""
    backend = None
    told = False
    try:
        name = backends.choose("auto", met.world.world_size)
        backend = backends.open_backend(
            name, met, device, backends.Settings(_COLLECTIVE_SECONDS, timeout)
        )
        found = _look_around(backend, met, run, table)
        report.table(table, [*unlike, *found])
        told = True
        _add_up(report, backend, met)
        # No rank closes the backend while another rank still uses it.
        backend.barrier()
        backend.close()
    except (HpctrainError, RuntimeError) as error:
        if not told:
            report.table(table, unlike)
        found_text, fixes = (
            (error.found, error.fixes)
            if isinstance(error, HpctrainError)
            else (f"the ranks cannot compute a sum: {plain(error)}", _NO_SUM)
        )
        if met.world.rank != 0:
            logger.error("%s", found_text)
        report.add([Finding("all-reduce", PROBLEM, found_text, fixes)])
        if backend is not None:
            backend.close(found_text)
    return report.end()


def _look_around(
    backend: "Backend", met: Rendezvous, run: Path, table: Sequence[ranks.Row]
) -> list[Finding]:
    """Compare the clocks, and check whether all ranks find rank 0's file in the run directory."""
    from hpctrain.tools.doctor import exchange

    said = met.roster.entries[0]["doctor"]
    there = bool(said["token"]) and ranks.sees(run, said)
    backend.barrier()
    told = exchange.tell(backend, [time.time(), float(there)])
    for row, (clock, _) in zip(table, told, strict=True):
        row.clock = clock - told[0][0]
    shared = ranks.judge_shared(met.roster.entries, table, [bool(row[1]) for row in told])
    return worst_last([*shared, *ranks.judge_clocks(table)])


def _add_up(report: Report, backend: "Backend", met: Rendezvous) -> None:
    """Check and time the sums, and time the transfers between hosts."""
    from hpctrain.tools.doctor import exchange

    sums = exchange.run_sums(backend)
    pairs = exchange.run_pairs(backend, met.roster)
    report.exchanged(
        sums.as_json(),
        [pair.as_json() for pair in pairs],
        [exchange.judge_sums(sums), *exchange.judge_pairs(pairs)],
    )
