"""Data files of a checkpoint: the elements of its tensors, which several ranks write at a time.

    rank-00003.bin     pieces of tensors, one after the other
    rank-00003.json    which pieces they are, until the manifest has this table
    rank-00003.failed  why they could not be written
    rank-00003.alive   renewed by a rank that waits at its end until it has written

A rank that holds a part of a tensor, as with FSDP, writes this part. Ranks that hold the same, as
with DDP, divide the bytes among them.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.durable_files import name_of, sync, write_bytes, write_data
from hpctrain.checkpoint.snapshot import Entry, Piece, Snapshot
from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import CheckpointError
from hpctrain.rundir import no_room

__all__ = [
    "Team",
    "collect",
    "hand_over",
    "name_of",
    "note_alive",
    "plan",
    "tables",
    "write_part",
]

# Ranks that hold the same share its bytes if each of them gets at least so many.
LEAST_BYTES = 1 << 24
# By what is known of the other ranks: for how many seconds rank 0 waits for their parts while it
# sees no change, and what it then says of a rank whose part is not there. A network file system may
# show late what other hosts have written.
_PATIENCE = {
    "writing": (math.inf, ""),
    "waited for by the training": (60.0, "did not write its part"),
    "leaving": (3.0, "did not write its part"),
    "ready": (10.0, "wrote a part, which does not show up here"),
}


@dataclass
class Team:
    """Ranks that write a checkpoint together.

    Attributes:
        rank: this rank; rank 0 commits.
        able: ranks that see the run directory of rank 0, in ascending order.
        divided: whether each rank holds another part of the tensors, so that all of them write.
        name: host and process of rank 0, in the names of temporary folders; empty for a process
            alone.
        nonce: text that no other start has.
        others: what is known of the other ranks: `writing`, `waited for by the training` of rank 0,
            `leaving` (some may be gone), or `ready` (all have written their parts).
    """

    rank: int = 0
    able: Sequence[int] = (0,)
    divided: bool = False
    name: str = ""
    nonce: str = ""
    others: str = "writing"


def plan(snapshot: Snapshot, team: Team) -> None:
    """Choose the pieces that this rank writes, and the ranks that write; without an exchange."""
    lines: dict[Any, list[tuple[str, int, Entry]]] = {}
    for name, part in snapshot.parts.items():
        for number, entry in part.entries.items():
            ranks = entry.extent.ranks
            if entry.same is None and team.rank in ranks:
                lines.setdefault(ranks, []).append((name, number, entry))
    snapshot.writers = set(team.able) if team.divided else {0}
    for ranks, line in lines.items():
        able = [rank for rank in ranks if rank in team.able]
        total = sum(entry.flat.nbytes for _, _, entry in line)
        count = max(1, min(len(able), total // LEAST_BYTES))
        # Those of several hosts, as each has a network card of its own.
        writers = [able[number * len(able) // count] for number in range(count)]
        snapshot.writers.update(writers)
        if team.rank in writers:
            number = writers.index(team.rank)
            limits = total * number // count, total * (number + 1) // count
            snapshot.pieces += _cut(line, *limits)


def _cut(line: Sequence[tuple[str, int, Entry]], begin: int, end: int) -> list[Piece]:
    """Return what lies between two bytes of a line of tensors."""
    pieces, at = [], 0
    for name, number, entry in line:
        flat, item = entry.flat, entry.flat.element_size()
        count = flat.numel()
        if begin <= at and at + count * item <= end:
            first, last = 0, count
        else:
            first, last = (min(max(-((at - limit) // item), 0), count) for limit in (begin, end))
            flat = flat[first:last]
        at += count * item
        if first < last:
            source = flat.view(torch.uint8)
            pieces.append(Piece(name, number, entry.extent.start + first, source, item))
    return pieces


def write_part(folder: Path, rank: int, snapshot: Snapshot) -> dict[str, Any]:
    """Write the data file of this rank, and return its table.

    Raises:
        OSError: the file could not be written.
    """
    sources = [piece.source for piece in snapshot.pieces]
    file, offsets = write_data(folder / name_of(rank), sources)
    pieces: dict[str, list[Any]] = {}
    for piece, offset in zip(snapshot.pieces, offsets, strict=True):
        count = piece.source.numel() // piece.item
        pieces.setdefault(piece.part, []).append([piece.number, piece.start, count, offset])
    return {"file": file, "pieces": pieces}


def hand_over(folder: Path, team: Team, snapshot: Snapshot) -> None:
    """Write the part of a rank other than 0, and then its table, for rank 0.

    Raises:
        OSError: it could not be written; rank 0 finds the reason in the folder, if there is room.
    """
    base = folder / name_of(team.rank)
    half = base.with_suffix(".half")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        snapshot.ready()
        table = {**write_part(folder, team.rank, snapshot), "tensors": _shared(snapshot)}
        write_bytes(half, json.dumps(table).encode())
        half.rename(base.with_suffix(".json"))
        sync(folder)
    except (OSError, RuntimeError, MemoryError) as error:
        number = error.errno if isinstance(error, OSError) else None
        text = json.dumps([number, f"{socket.gethostname()}: {error}"])
        with contextlib.suppress(OSError):
            base.unlink(missing_ok=True)  # or a full disk has no room for the reason
            half.write_text(text)
        with contextlib.suppress(OSError):
            half.rename(base.with_suffix(".failed"))
        raise


def collect(folder: Path, team: Team, snapshot: Snapshot) -> dict[int, dict[str, Any]]:
    """Wait for the other ranks, and return their tables by rank; called by rank 0.

    Raises:
        CheckpointError: another rank could not write its part, or did not, or has other tensors.
        OSError: the folder cannot be read, or the disk of another rank takes no more data.
    """
    others = snapshot.writers - {team.rank}
    waited = {rank: (folder / name_of(rank)).with_suffix(".json") for rank in others}
    since, before = time.monotonic(), (-1, -1)
    delay = 0.005
    while True:
        # The names are listed, as a network file system keeps in mind which name does not exist.
        names = set(os.listdir(folder)) if waited else set()
        for rank, path in waited.items():
            failed = path.with_suffix(".failed")
            if failed.name in names:
                raise _failed(folder, rank, failed.read_text(errors="replace"))
        missing = [rank for rank, path in waited.items() if path.name not in names]
        if not missing:
            break
        now, (limit, what) = _size_and_time(folder), _PATIENCE[team.others]
        if now != before or limit == math.inf:
            before, since = now, time.monotonic()
        if time.monotonic() - since > limit:
            raise _without(folder, missing, what)
        time.sleep(delay)
        delay = min(2 * delay, 0.25)
    tables = {}
    for rank, path in waited.items():
        tables[rank] = json.loads(path.read_text())
        path.unlink()
        if tables[rank]["tensors"] != _shared(snapshot):
            raise _without(folder, [rank], "has tensors of other sizes or types than rank 0")
    return tables


def _size_and_time(folder: Path) -> tuple[int, int]:
    """Return the bytes of all files in a folder, and the time of the newest change."""
    size = newest = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # it may be renamed meanwhile
            facts = entry.stat()
            size, newest = size + facts.st_size, max(newest, facts.st_mtime_ns)
    return size, newest


def note_alive(folder: Path, rank: int) -> None:
    """Let rank 0 wait longer for the part of a rank that is about to end."""
    with contextlib.suppress(OSError):
        (folder / name_of(rank)).with_suffix(".alive").touch()


def tables(
    snapshot: Snapshot, parts: Mapping[int, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the manifest: the tensors of each part, and where their pieces are.

    Args:
        snapshot: snapshot of rank 0.
        parts: table of each rank that has written.
    """
    found: dict[tuple[str, int], list[list[Any]]] = {}
    for rank, table in sorted(parts.items()):
        for name, pieces in table["pieces"].items():
            for number, start, count, offset in pieces:
                found.setdefault((name, number), []).append([rank, offset, start, count])
    return {
        name: [
            {
                "number": number,
                "name": entry.name,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.extent.shape),
                **({} if entry.order is None else {"order": entry.order}),
                **(
                    {"same": entry.same}
                    if entry.same is not None
                    else {"pieces": sorted(found.get((name, number), []), key=lambda one: one[2])}
                ),
            }
            for number, entry in part.entries.items()
        ]
        for name, part in snapshot.parts.items()
        if part.entries
    }


def _shared(snapshot: Snapshot) -> list[Any]:
    """Return the tensors that other ranks hold, too, in a form that JSON returns unchanged."""
    return [
        [name, number, str(entry.dtype), list(entry.extent.shape), list(entry.order or ())]
        for name, part in snapshot.parts.items()
        for number, entry in part.entries.items()
        if entry.shared
    ]


def _failed(folder: Path, rank: int, text: str) -> Exception:
    """Return the error for a rank that has told why it could not write its part."""
    try:
        number, reason = json.loads(text)
    except ValueError:  # it could not tell even that
        number, reason = None, "the reason could not be written, either"
    error = OSError(number, f"rank {rank} on {reason}")
    if no_room(folder, "", error):
        return error
    return _without(folder, [rank], f"could not write its part: {reason}")


def _without(folder: Path, ranks: Sequence[int], what: str) -> CheckpointError:
    return CheckpointError("HT705.incomplete", folder=folder, ranks=ranks_text(ranks), problem=what)
