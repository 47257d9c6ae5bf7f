"""The ranks compute sums together: are they right, and how fast do bytes travel?"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.backends.base import Backend
from hpctrain.rendezvous import Roster
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding, plain, spans

__all__ = ["Pair", "Sums", "judge_pairs", "judge_sums", "rounds", "run_pairs", "run_sums", "tell"]

_MB = 10**6
_CHECKED = (1, 1000, 100_003)  # elements; the last one fits no power of two
_REPEATS = 5
_PAIR_REPEATS = 3
_MOST_ROUNDS = 63


def tell(backend: Backend, numbers: Sequence[float]) -> list[list[float]]:
    """By rank, the numbers that each one gave, on all ranks."""
    table = torch.zeros(
        backend.world_size, len(numbers), dtype=torch.float64, device=backend.device
    )
    table[backend.rank] = torch.tensor(numbers, dtype=torch.float64)
    rows: list[list[float]] = backend.sum(table).tolist()
    return rows


def checked(backend: Backend, count: int) -> bool:
    """Whether a sum of whole numbers, other ones at each rank, is exact here."""
    pattern = torch.arange(count, dtype=torch.float64, device=backend.device) % 1009 + 1
    total = backend.world_size * (backend.world_size + 1) // 2
    return bool(torch.equal(backend.sum(pattern * (backend.rank + 1)), pattern * total))


@dataclass(slots=True)
class Sums:
    """What the all-reduce did.

    Attributes:
        transport: what carried it.
        wrong: the ranks where a sum was not exact.
        speeds: by bytes, the median bus bandwidth in GB/s at the slowest rank.
        copy: GB/s of a copy within rank 0's own device.
    """

    transport: str
    wrong: list[int]
    speeds: dict[int, float]
    copy: float

    def as_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {
            "transport": self.transport,
            "correct": not self.wrong,
            "wrong_at_ranks": self.wrong,
            "bus_bandwidth": [
                {"bytes": size, "gigabytes_per_second": speed}
                for size, speed in self.speeds.items()
            ],
            "copy_gigabytes_per_second": self.copy,
        }


def run_sums(backend: Backend) -> Sums:
    """Check and time; called by all ranks alike."""
    # All of them, even after a wrong one: every rank takes part in every sum.
    exact = sum(checked(backend, count) for count in _CHECKED) == len(_CHECKED)
    sizes = (_MB, 64 * _MB if backend.device.type == "cuda" else 16 * _MB)
    n = backend.world_size
    # Bytes that pass each rank's link, as nccl-tests' PERFORMANCE.md defines the bus bandwidth.
    carried = [2 * (n - 1) / n * size / _time_sum(backend, size) / 1e9 for size in sizes]
    # The others wait meanwhile, so that nothing else uses the memory.
    copy = _time_copy(backend.device, sizes[-1]) if backend.rank == 0 else 0.0
    told = tell(backend, [float(exact), *carried, copy])
    return Sums(
        backend.transport,
        [rank for rank, row in enumerate(told) if not row[0]],
        {size: min(row[1 + i] for row in told) for i, size in enumerate(sizes)},
        told[0][-1],
    )


def _time_sum(backend: Backend, size: int) -> float:
    tensor = torch.zeros(size // 4, device=backend.device)
    backend.sum(tensor)  # the first one opens connections
    return _median(backend.device, lambda: backend.sum(tensor), _REPEATS, backend.barrier)


def _time_copy(device: torch.device, size: int) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return size / _median(device, lambda: target.copy_(source), _REPEATS, lambda: None) / 1e9


def _median(
    device: torch.device,
    action: Callable[[], object],
    repeats: int,
    before: Callable[[], None],
) -> float:
    """Seconds that an action takes; the device has done it by then."""
    seconds = []
    for _ in range(repeats):
        before()
        _finish(device)
        began = time.perf_counter()
        action()
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Pair:
    """One way from one host to another.

    Attributes:
        source, target: hosts.
        speed: GB/s.
    """

    source: str
    target: str
    speed: float

    def as_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {
            "source": self.source,
            "target": self.target,
            "gigabytes_per_second": self.speed,
        }


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Who plays whom in a tournament of all against all, in which nobody plays twice at once.

    The circle method: one stays, the others move on by a place. At most 63 rounds, so with more
    than 64 players everybody meets 62 or 63 others.
    """
    circle = list(range(count)) + ([-1] if count % 2 else [])  # -1: sits out
    games = []
    for _ in range(min(len(circle) - 1, _MOST_ROUNDS)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        games.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return games


def run_pairs(backend: Backend, roster: Roster) -> list[Pair]:
    """Time the ways between the first ranks of the hosts; called by all ranks alike."""
    first = [roster.host_of_rank.index(host) for host in range(len(roster.hosts))]
    size = 64 * _MB if backend.device.type == "cuda" else 16 * _MB
    games = rounds(len(first))
    received = [0.0] * 2 * len(games)  # there and back
    for number, game in enumerate(games):
        backend.barrier()
        for pair in game:
            for back, (source, target) in enumerate((pair, pair[::-1])):
                if backend.rank in (first[source], first[target]):
                    speed = _time_way(backend, first[source], first[target], size)
                    if backend.rank == first[target]:
                        received[2 * number + back] = speed
    told = tell(backend, received)
    return [
        Pair(roster.hosts[source], roster.hosts[target], told[first[target]][2 * number + back])
        for number, game in enumerate(games)
        for pair in game
        for back, (source, target) in enumerate((pair, pair[::-1]))
    ]


def _time_way(backend: Backend, source: int, target: int, size: int) -> float:
    """GB/s from one rank to another, as the target sees it; both call it."""
    load = torch.zeros(size // 4, device=backend.device)
    word = torch.zeros(1, device=backend.device)

    def send() -> Tensor:
        backend.send_recv(word, target, source)  # the target is waiting from here on
        backend.send_recv(load, source, target)
        return load

    send()  # the first one opens the connection
    return size / _median(backend.device, send, _PAIR_REPEATS, lambda: None) / 1e9


def judge_sums(sums: Sums) -> Finding:
    """Were the sums right?"""
    if sums.wrong:
        return Finding(
            "all-reduce",
            PROBLEM,
            f"a wrong sum over {sums.transport} at {spans(sums.wrong)}: training there computes "
            "wrong gradients",
            "leave the hosts of these ranks out (srun --exclude=HOSTS), and tell who runs them",
            tuple(sums.wrong),
        )
    return Finding("all-reduce", OK, f"exact sums at all ranks over {sums.transport}", "", (0,))


def judge_pairs(pairs: Sequence[Pair]) -> list[Finding]:
    """Hosts, and ways between two hosts, that are clearly slower than the others.

    A host is slow where even its fastest way is, compared with those of the other hosts: then it
    is named, and not all the ways from or to it. It takes three hosts to tell.
    """
    if len({pair.source for pair in pairs}) < 3:
        return []
    found = []
    rest = list(pairs)
    for end, does in (("source", "sends"), ("target", "receives")):
        best: dict[str, float] = {}
        for pair in pairs:
            host = getattr(pair, end)
            best[host] = max(best.get(host, 0.0), pair.speed)
        median = statistics.median(best.values())
        for host, speed in best.items():
            if speed < median / 2:
                rest = [pair for pair in rest if getattr(pair, end) != host]
                text = f"{host} {does} at most {speed:.3g} GB/s, half of the hosts {median:.3g}"
                found.append(_slow(text, host))
    median = statistics.median(pair.speed for pair in rest)
    return found + [
        _slow(
            f"{one.source} to {one.target}: {one.speed:.3g} GB/s, half of the ways {median:.3g}",
            one.target,
        )
        for one in rest
        if one.speed < median / 2
    ]


def _slow(text: str, host: str) -> Finding:
    fix = f"leave it out: srun --exclude={host}    look at its link with ethtool or ibstat"
    return Finding("slow network", WARNING, plain(f"{text} or more"), plain(fix))
