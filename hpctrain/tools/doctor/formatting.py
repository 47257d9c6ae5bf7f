"""Text of the report: aligned, for a terminal with a hundred columns."""

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpctrain.cluster.texts import ranks_text
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.rank_comparison import COMPARED, Row

__all__ = ["closing", "exchanged", "machine", "passed", "remarks", "table"]

_COLUMNS = 100
_SUBJECT = 18
_FIX, _OR = "    fix:      ", "    or:       "
# From this rank on, only ranks that differ have a row.
_MOST_ROWS = 64


def _line(subject: str, text: str) -> str:
    return textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=f"  {subject:<{_SUBJECT}}",
        subsequent_indent=" " * (_SUBJECT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def passed(findings: Iterable[Finding]) -> list[str]:
    """Return one line for each finding of level ok."""
    return [_line(f.subject, f.found) for f in findings if f.level == OK]


def machine(host: str, findings: Iterable[Finding], environment: Mapping[str, str]) -> str:
    """Return the findings of level ok on this machine, and the environment variables."""
    lines = [f"this machine: {host}", *passed(findings)]
    if environment:
        values = " ".join(f"{name}={value}" for name, value in environment.items())
        lines.append(_line("variables", values))
    return "\n".join(lines)


def remarks(findings: Iterable[Finding], hosts: Sequence[str]) -> str:
    """Return the warnings and problems with their fixes; empty where there are none.

    Args:
        findings: findings of all levels; those of level ok are left out.
        hosts: host name of each rank, in the order of ranks.
    """
    lines = []
    for finding in findings:
        if finding.level == OK:
            continue
        where = _where(finding.ranks, hosts)
        label = "PROBLEM" if finding.level == PROBLEM else finding.level
        lines.append(_line(label, f"{finding.subject}{where}: {finding.found}"))
        # Do not wrap a command that the user copies.
        lines += [f"{_OR if number else _FIX}{fix}" for number, fix in enumerate(finding.fixes)]
    return "\n".join(lines)


def _where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks and hosts of a finding; empty where it concerns all ranks."""
    if len(ranks) in (0, len(hosts)):
        return ""
    # Only the first rank of a host checks what its ranks share.
    if list(ranks) == [hosts.index(host) for host in dict.fromkeys(hosts)]:
        return " (every host)" if len(ranks) > 1 else ""
    return f" ({ranks_text(ranks, hosts)})"


def table(rows: Sequence[Row]) -> str:
    """Return a table with a row for each rank; equal values of all ranks are in one line above."""
    same = [name for name in COMPARED if len({row.values[name] for row in rows}) == 1]
    varying = [name for name in COMPARED if name not in same]
    head = ["rank", "host", "local", "pid", "address", "clock"]
    if any(row.gpu for row in rows):
        head.append("GPU")
    cells = [[*head, *varying]]
    shown = [row for row in rows if row.rank < _MOST_ROWS or row.differs]
    for row in shown:
        clock = "?" if row.clock is None else f"{row.clock:+.3f} s"
        own = [str(row.rank), row.host, str(row.local_rank), str(row.pid), row.address, clock]
        if "GPU" in head:
            own.append((row.gpu or "-")[:12])
        values = [row.values[name] + (" *" if name in row.differs else "") for name in varying]
        cells.append([*own, *values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    count = len({row.host for row in rows})
    lines = [f"{len(rows)} ranks on {count} host{'s' if count > 1 else ''}"]
    if same:
        common = ", ".join(f"{name} {rows[0].values[name]}" for name in same)
        lines.append(_line("same values", common))
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(f"  {'  '.join(padded)}".rstrip())
    if len(shown) < len(rows):
        lines.append(f"  … and {len(rows) - len(shown)} more like these; --json lists all")
    if any(row.differs for row in rows):
        lines.append("  * differs from most ranks")
    return "\n".join(lines)


def exchanged(sums: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]) -> str:
    """Return the results of the sums and of the transfers between hosts.

    Args:
        sums, pairs: results as `--json` prints them.
    """
    right = "exact at all ranks" if sums["correct"] else "WRONG"
    lines = [_line("all-reduce", f"{right}, over {sums['transport']}")]
    for result in sums["bus_bandwidth"]:
        text = f"{result['gigabytes_per_second']:.3g} GB/s bus bandwidth"
        lines.append(_line(f"  of {result['bytes'] // 10**6} MB", text))
    text = f"{sums['copy_gigabytes_per_second']:.3g} GB/s within rank 0's own device"
    lines.append(_line("  a copy", text))
    if pairs:
        speeds = [pair["gigabytes_per_second"] for pair in pairs]
        if len(speeds) == 2:
            way = f"{pairs[0]['source']} to {pairs[0]['target']}"
            text = f"{way} {speeds[0]:.3g}, back {speeds[1]:.3g} GB/s"
        else:
            text = (
                f"{len(speeds)} transfers: {min(speeds):.3g} to {max(speeds):.3g} GB/s, "
                f"median {statistics.median(speeds):.3g}"
            )
        lines.append(_line("between hosts", text))
    return "\n".join(lines)


def closing(findings: Sequence[Finding]) -> str:
    """Return the last line: the numbers of problems and warnings."""
    parts = []
    for level in (PROBLEM, WARNING):
        subjects = list(dict.fromkeys(f.subject for f in findings if f.level == level))
        count = sum(finding.level == level for finding in findings)
        if count:
            plural = "s" if count > 1 else ""
            parts.append(f"{count} {level}{plural} ({', '.join(subjects)})")
    return "; ".join(parts) or "no problems, no warnings"
