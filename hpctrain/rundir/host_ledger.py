"""Ledger of the faults of hosts, beside the runs: which hosts the next jobs leave out.

A line of JSON for each fault, which is only ever appended. A person clears a host by removing its
lines.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.rundir import RunDirectory, append

__all__ = ["LEDGER", "LOST", "PREFLIGHT", "UNLIKE", "avoided", "clearing", "note"]

#: File below the folder from which the jobs were submitted.
LEDGER = Path("runs/.hosts.jsonl")

#: Kinds of faults: the host did not answer, failed its check before the start, or computed other
#: weights than the other hosts.
LOST, PREFLIGHT, UNLIKE = "lost", "preflight", "unlike-weights"

_SECONDS = 24 * 3600.0


def note(top: Path, hosts: Sequence[str], kind: str, job: str) -> None:
    """Append a fault of each host; a ledger that cannot be written changes nothing.

    Args:
        top: folder from which the job was submitted.
        hosts: names of the hosts.
        kind: LOST, PREFLIGHT or UNLIKE.
        job: label of the job.
    """
    lines = [
        json.dumps({"time": round(time.time(), 3), "host": host, "kind": kind, "job": job})
        for host in hosts
    ]
    if not lines:
        return
    with contextlib.suppress(OSError):
        (top / LEDGER).parent.mkdir(exist_ok=True)
        append(top / LEDGER, "\n".join(lines))


def avoided(top: Path, job: str = "") -> list[str]:
    """Return the hosts to leave out, the newest fault first.

    These are the hosts that failed a check before a start within the last day, had two faults in
    it, or had a fault in the given job.

    Args:
        top: folder from which the job is or was submitted.
        job: label of a job; empty for none.
    """
    faults = [fault for fault in _faults(top / LEDGER) if fault["time"] > time.time() - _SECONDS]
    counts = Counter(fault["host"] for fault in faults)
    once = {f["host"] for f in faults if f["kind"] == PREFLIGHT or (job and f["job"] == job)}
    hosts = dict.fromkeys(fault["host"] for fault in reversed(faults))
    return [host for host in hosts if counts[host] > 1 or host in once]


def clearing(hosts: Sequence[str]) -> str:
    """Return the command that clears hosts, to type in the folder from which jobs are submitted."""
    return f"sed -i -E '/\"({'|'.join(hosts)})\"/d' {LEDGER}"


def _faults(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for fault in RunDirectory(path.parent).each(path):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # not one of these
                yield {
                    **{name: str(fault[name]) for name in ("host", "kind", "job")},
                    "time": float(fault["time"]),
                }
