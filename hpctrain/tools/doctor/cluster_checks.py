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
from hpctrain.cluster.texts import printable
from hpctrain.errors import HpctrainError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Answer, Rendezvous, Roster
from hpctrain.tools.doctor import rank_comparison
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
    "not tried, and clocks and run directory not compared: not all ranks could take part",
    ("fix the other problems first",),
)
_NO_SUM = (
    "look for a firewall between the hosts",
    "export HPCTRAIN_INTERFACE=NAME, if the ranks use a wrong interface",
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
    with rank_comparison.token(rank, run) as token:
        try:
            met = _meet(start, own, _entry(own, token, env), run, timeout)
        except HpctrainError as error:
            if rank != 0 and not error.reported_by_rank_0:
                raise
            found = Finding("start", PROBLEM, error.found, error.fixes, (rank,))
            report.machines([*worst_last(own.findings), found])
            report.end()
            return error.exit_code
        others = merged([entry["doctor"]["findings"] for entry in met.roster.entries])
        table = rank_comparison.rows(met.roster)
        passed = [finding for finding in own.findings if finding.level == OK]
        report.machines([*passed, *others], [row.host for row in table])
        differing = _differences(met.roster, table)
        if own.device is not None and met.shared["communicate"]:
            return _check_communication(report, met, own.device, run, table, differing, timeout)
        if met.listener is not None:
            met.listener.close()
        report.table(table, [_NOT_TRIED, *differing])
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
        check=_decide,
    )


def _decide(roster: Roster) -> Answer:
    """Return whether the ranks can communicate, and rank 0's file in the run directory."""
    found = _differences(roster, rank_comparison.rows(roster))
    wrong = any(finding.level == PROBLEM for finding in found)
    token = {name: roster.entries[0]["doctor"][name] for name in ("run", "token")}
    return Answer(shared={"communicate": _can_communicate(roster) and not wrong, "token": token})


def _entry(own: Machine, token: Mapping[str, str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry that this rank sends to the others at the rendezvous."""
    values: dict[str, Any] = {}
    if own.device is not None:
        from hpctrain.rendezvous import consistency

        values = consistency.entry(own.device, {})
    shown = visible_gpus.visible(env)
    return {
        **values,
        "doctor": {
            **token,
            "findings": to_send(own.findings),
            "kind": own.device.type if own.device is not None else None,
            "gpu": values.get("gpu"),
            "device": values.get("gpu_name")
            or (own.device.type if own.device else rank_comparison.NONE),
            "visible": ",".join(shown.names) or "hidden" if shown else "all",
            "cores": str(own.cores),
            "mask": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
            "threads": env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS") or "not set",
            "torch": own.torch_version or rank_comparison.NONE,
            "python": platform.python_version(),
            "hpctrain": __version__,
        },
    }


def _can_communicate(roster: Roster) -> bool:
    """Return whether all ranks have a device, and all devices are of one kind."""
    kinds = {entry["doctor"]["kind"] for entry in roster.entries}
    return None not in kinds and len(kinds) == 1


def _differences(roster: Roster, table: Sequence[rank_comparison.Row]) -> list[Finding]:
    """Return the differences between the ranks, problems last."""
    entries = roster.entries
    found = []
    # A rank without torch sends no versions.
    if entries and all(entry.get("versions") for entry in entries):
        from hpctrain.rendezvous import consistency

        hosts = [row.host for row in table]
        found = [
            Finding(
                difference.subject,
                PROBLEM if difference.wrong else WARNING,
                printable(difference.found),
                difference.fixes,
            )
            for difference in consistency.differences(entries, hosts)
        ]
    subjects = {finding.subject for finding in found}
    found += [
        finding for finding in rank_comparison.differences(table) if finding.subject not in subjects
    ]
    return worst_last([*found, *rank_comparison.judge_cores(entries, table)])


def _check_communication(
    report: Report,
    met: Rendezvous,
    device: "torch.device",
    run: Path,
    table: Sequence[rank_comparison.Row],
    differing: Sequence[Finding],
    timeout: float,
) -> int:
    """Check clocks, run directory, sums and transfers between hosts; return an exit code."""
    backend = None
    table_printed = False
    try:
        name = backends.choose("auto", met.world.world_size)
        backend = backends.open_backend(
            name, met, device, backends.BackendSettings(_COLLECTIVE_SECONDS, timeout)
        )
        found = _compare_machines(backend, met, run, table)
        report.table(table, [*differing, *found])
        table_printed = True
        _measure_communication(report, backend, met)
        # No rank closes the backend while another rank still uses it.
        backend.barrier()
        backend.close()
    except (HpctrainError, RuntimeError) as error:
        if not table_printed:
            report.table(table, differing)
        if isinstance(error, HpctrainError):
            message, fixes = error.found, error.fixes
        else:
            text = printable(" ".join(str(error).split()))
            message, fixes = f"the ranks cannot compute a sum: {text}", _NO_SUM
        if met.world.rank != 0:
            logger.error("%s", message)
        report.add([Finding("all-reduce", PROBLEM, message, fixes)])
        if backend is not None:
            backend.close(message)
    return report.end()


def _compare_machines(
    backend: "Backend", met: Rendezvous, run: Path, table: Sequence[rank_comparison.Row]
) -> list[Finding]:
    """Compare the clocks, and check whether all ranks find rank 0's file in the run directory."""
    from hpctrain.tools.doctor import communication

    token = met.shared["token"]
    found = bool(token["token"]) and rank_comparison.finds(run, token)
    backend.barrier()
    numbers = communication.gather_numbers(backend, [time.time(), float(found)])
    if met.world.rank != 0:
        return []  # only rank 0 has the entries, and prints
    for row, (clock, _) in zip(table, numbers, strict=True):
        row.clock = clock - numbers[0][0]
    shared = rank_comparison.judge_shared(
        met.roster.entries, table, [bool(row[1]) for row in numbers]
    )
    return worst_last([*shared, *rank_comparison.judge_clocks(table)])


def _measure_communication(report: Report, backend: "Backend", met: Rendezvous) -> None:
    """Check and time the sums, and time the transfers between hosts."""
    from hpctrain.tools.doctor import communication

    sums = communication.run_sums(backend)
    pairs = communication.run_pairs(backend, met.roster)
    report.exchanged(
        sums.as_json(),
        [pair.as_json() for pair in pairs],
        [communication.judge_sums(sums), *communication.judge_pairs(pairs)],
    )
