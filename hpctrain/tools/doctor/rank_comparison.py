"""Comparison of all ranks by their rendezvous entries: table, and findings on differences."""

import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.cluster.texts import printable, ranks_text
from hpctrain.rendezvous import Roster
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.storage import nearest
from hpctrain.tools.doctor.subprocesses import SECONDS, within

__all__ = [
    "COMPARED",
    "NONE",
    "Row",
    "differences",
    "finds",
    "judge_clocks",
    "judge_cores",
    "judge_shared",
    "rows",
    "token",
]

_CLOCK_SECONDS = 1.0
NONE = "none"  # value of a rank without torch or a device
_SAME_PYTHON = ("start all ranks with one virtual environment, its python by the full path",)
# Values that should be the same at all ranks, each with the fixes where they differ.
COMPARED = {
    "device": (
        "ask for one kind of GPU: sbatch --gpus=TYPE:N",
        "ask for hosts of one kind: sbatch --constraint=FEATURE",
    ),
    "visible": (
        "let the launcher set CUDA_VISIBLE_DEVICES and its like, and no shell start-up file",
    ),
    "cores": ("srun --cpus-per-task=N, the same for all ranks",),
    "threads": ("export OMP_NUM_THREADS=N before the start, the same for all ranks",),
    "torch": _SAME_PYTHON,
    "python": _SAME_PYTHON,
    "hpctrain": _SAME_PYTHON,
}


@dataclass(slots=True)
class Row:
    """One rank as a row of the table.

    Attributes:
        rank, host, local_rank, pid, address: values from the rendezvous.
        gpu: unique identifier of the rank's GPU; None on a CPU.
        values: values that are compared between ranks, as text for people.
        clock: seconds by which its clock is ahead of rank 0's; None where it was not measured.
        differs: names of the values that differ from the expected ones.
    """

    rank: int
    host: str
    local_rank: int
    pid: int
    address: str
    gpu: str | None
    values: dict[str, str]
    clock: float | None = None
    differs: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the row as `--json` prints it."""
        return {
            "rank": self.rank,
            "host": self.host,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "address": self.address,
            "gpu": self.gpu,
            **self.values,
            "clock_offset": self.clock,
            "differs": self.differs,
        }


def rows(roster: Roster) -> list[Row]:
    """Return the rows of the table, with the differing values marked."""
    table = [
        Row(
            rank,
            roster.hosts[roster.host_of_rank[rank]],
            entry["world"]["local_rank"],
            entry["pid"],
            roster.addresses[rank],
            entry["doctor"]["gpu"],
            {name: printable(entry["doctor"][name]) for name in COMPARED},
        )
        for rank, entry in enumerate(roster.entries)
    ]
    for name in COMPARED:
        for row, norm in zip(table, _norms(table, name), strict=True):
            if row.values[name] != norm:
                row.differs.append(name)
    return table


def _norms(table: Sequence[Row], name: str) -> list[str]:
    """Return the expected value of each rank: the most frequent one among the ranks.

    Among equally frequent values it is the one that the lowest rank has. Where a launcher gives
    each rank of a host its own GPUs, only ranks with the same local rank are compared.
    """
    bound = name == "visible" and _bound(table)
    groups: dict[int, Counter[str]] = {}
    for row in table:
        groups.setdefault(row.local_rank if bound else 0, Counter())[row.values[name]] += 1
    # Among equal counts, most_common puts the first counted value first: the lowest rank's.
    norms = {key: counts.most_common(1)[0][0] for key, counts in groups.items()}
    return [norms[row.local_rank if bound else 0] for row in table]


def _bound(table: Sequence[Row]) -> bool:
    """Return whether on every host each rank sees different GPUs."""
    on_host: dict[str, list[str]] = {}
    for row in table:
        on_host.setdefault(row.host, []).append(row.values["visible"])
    several = any(len(values) > 1 for values in on_host.values())
    return several and all(len(values) == len(set(values)) for values in on_host.values())


def differences(table: Sequence[Row]) -> list[Finding]:
    """Return a finding for each value that is not the same at all ranks."""
    found = []
    for name, fixes in COMPARED.items():
        # A rank without a value has a separate problem finding.
        differing = [row for row in table if name in row.differs and row.values[name] != NONE]
        if not differing:
            continue
        holders: dict[str, list[Row]] = {}
        for row in table:
            if row not in differing and row.values[name] != NONE:
                holders.setdefault(row.values[name], []).append(row)
        for row in differing:
            holders.setdefault(row.values[name], []).append(row)
        parts = [
            f"{value} at {_ranks_text(rows, named=rows[0] in differing)}"
            for value, rows in holders.items()
        ]
        text = "; ".join(parts[:4]) + ("; …" if len(parts) > 4 else "")
        found.append(Finding(name, WARNING, text, fixes, tuple(row.rank for row in differing)))
    return found


def _ranks_text(rows: Sequence[Row], named: bool = True) -> str:
    """Return the ranks of some rows as text, with their hosts if `named`."""
    hosts = {row.rank: row.host for row in rows}
    return ranks_text(hosts, hosts if named else None)


def judge_cores(entries: Sequence[Mapping[str, Any]], table: Sequence[Row]) -> list[Finding]:
    """Return a warning where ranks share cores and have more threads than there are cores.

    A rank without a thread setting counts as one thread, because the Session divides the cores.

    Args:
        entries: entry of each rank, with the bit mask of its cores under "doctor".
        table: row of each rank, with its host and threads.
    """
    sharing: dict[tuple[str, str], list[Row]] = {}
    for entry, row in zip(entries, table, strict=True):
        sharing.setdefault((row.host, entry["doctor"]["mask"]), []).append(row)
    short: dict[tuple[int, int, int], list[Row]] = {}
    for (_, mask), several in sharing.items():
        cores = int(mask, 16).bit_count()
        settings = [row.values["threads"] for row in several]
        threads = sum(int(text) if text.isdecimal() else 1 for text in settings)
        if len(several) > 1 and threads > cores:
            short.setdefault((len(several), threads, cores), []).extend(several)
    return [
        Finding(
            "cores",
            WARNING,
            f"{_ranks_text(several)}: {count} ranks of a host share {cores} "
            f"core{'s' if cores > 1 else ''} and have {threads} threads, before any loader worker",
            (
                "start fewer ranks on each host",
                "export OMP_NUM_THREADS=N with fewer threads",
                "srun --cpus-per-task=N",
            ),
            tuple(row.rank for row in several),
        )
        for (count, threads, cores), several in short.items()
    ]


def judge_clocks(table: Sequence[Row]) -> list[Finding]:
    """Return a warning for each host whose clock differs from rank 0's by more than a second.

    Logs and time limits of different hosts are compared with each other.
    """
    wrong: dict[str, list[Row]] = {}
    for row in table:
        if row.clock is not None and abs(row.clock) > _CLOCK_SECONDS:
            wrong.setdefault(row.host, []).append(row)
    fixes = ("as root, there: timedatectl set-ntp true", "look there at chronyc tracking")
    return [
        Finding(
            "clocks",
            WARNING,
            f"{host} is {abs(several[0].clock or 0.0):.1f} s "
            f"{'ahead of' if (several[0].clock or 0.0) > 0 else 'behind'} {table[0].host}",
            fixes,
            tuple(row.rank for row in several),
        )
        for host, several in wrong.items()
    ]


@contextmanager
def token(rank: int, run: Path) -> Iterator[dict[str, str]]:
    """Create an empty file in the run directory at rank 0, and remove it at the end.

    The other ranks receive its path at the rendezvous, and check whether they find it.

    Yields:
        "run", the run directory, and "token", the path of the file; "" at the other ranks, and
        where it could not be created. A run directory that does not exist is not created: the file
        is then in the nearest existing directory above it.
    """
    if rank != 0:
        yield {"run": str(run), "token": ""}
        return
    path = within(SECONDS, lambda: _create(run))
    try:
        yield {"run": str(run), "token": str(path or "")}
    finally:
        if path is not None:
            within(SECONDS, lambda: path.unlink(missing_ok=True))


def _create(run: Path) -> Path | None:
    """Create a file; None on an error, which the finding about the run directory reports."""
    path = nearest(run) / f".hpctrain-doctor-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        return None
    return path


def finds(run: Path, values: Mapping[str, str]) -> bool:
    """Return whether rank 0's file is in this rank's run directory, which may have another path.

    Args:
        run: run directory of this rank.
        values: values that `token` yielded at rank 0.
    """
    file = Path(values["token"])
    same = str(run) == values["run"]
    exists = within(SECONDS, lambda: os.path.exists(file if same else nearest(run) / file.name))
    return bool(exists)


def judge_shared(
    entries: Sequence[Mapping[str, Any]], table: Sequence[Row], found: Sequence[bool]
) -> list[Finding]:
    """Return a finding on whether all ranks have the same run directory.

    Args:
        entries: entry of each rank, with the values that `token` yielded under "doctor".
        table: row of each rank, with its host.
        found: for each rank, whether it found rank 0's file.

    Returns:
        No finding where rank 0 could not create the file.
    """
    if not entries[0]["doctor"]["token"]:
        return []
    subject, own = "shared directory", printable(entries[0]["doctor"]["run"])
    without = [row for row, exists in zip(table, found, strict=True) if not exists]
    if not without:
        hosts = len({row.host for row in table})
        text = f"all ranks on {hosts} host{'s' if hosts > 1 else ''} have the same {own}"
        return [Finding(subject, OK, text, ranks=(0,))]
    theirs = printable(entries[without[0].rank]["doctor"]["run"])
    other = "" if theirs == own else f", whose run directory is {theirs}"
    return [
        Finding(
            subject,
            PROBLEM,
            f"{own}: the file of rank 0 is not visible at {_ranks_text(without)}{other}",
            (
                "--run-dir DIR, an absolute path on a file system that all hosts share",
                "export HPCTRAIN_RUN_DIR=DIR, with such a path",
            ),
            tuple(row.rank for row in without),
        )
    ]
