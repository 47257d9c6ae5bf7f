"""Communication between the ranks: correctness of the sums, and transfer speeds."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.backends.base import Backend
from hpctrain.cluster.texts import printable, ranks_text
from hpctrain.rendezvous import Roster
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding

__all__ = [
    "Pair",
    "Sums",
    "gather_numbers",
    "judge_pairs",
    "judge_sums",
    "rounds",
    "run_pairs",
    "run_sums",
]

_MB = 10**6
_CHECKED = (1, 1000, 100_003)  # elements; 2, 4, 8 … ranks cannot share the last evenly
_REPEATS = 5
_PAIR_REPEATS = 3
_MOST_ROUNDS = 63


def gather_numbers(backend: Backend, numbers: Sequence[float]) -> list[list[float]]:
    """Return the numbers of all ranks, a list for each rank; all ranks must call this together."""
    table = torch.zeros(
        backend.world_size, len(numbers), dtype=torch.float64, device=backend.device
    )
    table[backend.rank] = torch.tensor(numbers, dtype=torch.float64)
    rows: list[list[float]] = backend.sum(table).tolist()
    return rows


def checked(backend: Backend, count: int) -> bool:
    """Check whether a sum of whole numbers that differ between ranks is exact on this rank."""
    pattern = torch.arange(count, dtype=torch.float64, device=backend.device) % 1009 + 1
    total = backend.world_size * (backend.world_size + 1) // 2
    return bool(torch.equal(backend.sum(pattern * (backend.rank + 1)), pattern * total))


@dataclass(slots=True)
class Sums:
    """Results of the all-reduce.

    Attributes:
        transport: transport that carried the data.
        wrong: ranks where a sum was not exact.
        speeds: median bus bandwidth in GB/s at the slowest rank, by message size in bytes.
        copy: speed in GB/s of a copy within rank 0's own device.
    """

    transport: str
    wrong: list[int]
    speeds: dict[int, float]
    copy: float

    def as_json(self) -> dict[str, Any]:
        """Return the values as `--json` prints them."""
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
    """Check and time the all-reduce; all ranks must call this together."""
    # Run every check, even after a wrong sum: each sum needs all ranks.
    exact = sum(checked(backend, count) for count in _CHECKED) == len(_CHECKED)
    sizes = (_MB, 64 * _MB if backend.device.type == "cuda" else 16 * _MB)
    n = backend.world_size
    # Bytes over each rank's link per second. Source: bus bandwidth in nccl-tests' PERFORMANCE.md.
    carried = [2 * (n - 1) / n * size / _time_sum(backend, size) / 1e9 for size in sizes]
    # The other ranks wait in the meantime, so that nothing else uses the memory.
    copy = _time_copy(backend.device, sizes[-1]) if backend.rank == 0 else 0.0
    rows = gather_numbers(backend, [float(exact), *carried, copy])
    return Sums(
        backend.transport,
        [rank for rank, row in enumerate(rows) if not row[0]],
        {size: min(row[1 + i] for row in rows) for i, size in enumerate(sizes)},
        rows[0][-1],
    )


def _time_sum(backend: Backend, size: int) -> float:
    tensor = torch.zeros(size // 4, device=backend.device)
    backend.sum(tensor)  # the first call opens connections
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
    """Return the median time of an action in seconds, until the device has finished it."""
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
    """Speed of the transfer from one host to another.

    Attributes:
        source, target: names of the hosts.
        speed: speed in GB/s.
    """

    source: str
    target: str
    speed: float

    def as_json(self) -> dict[str, Any]:
        """Return the values as `--json` prints them."""
        return {
            "source": self.source,
            "target": self.target,
            "gigabytes_per_second": self.speed,
        }


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round of a tournament, so that transfers of a round are independent.

    A player has at most one partner in a round. Circle method: one player stays, the others move on
    by one place. There are at most 63 rounds: of more than 64 players, each meets 62 or 63 others.

    Args:
        count: number of players.
    """
    circle = list(range(count)) + ([-1] if count % 2 else [])  # the partner of -1 pauses
    games = []
    for _ in range(min(len(circle) - 1, _MOST_ROUNDS)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        games.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return games


def run_pairs(backend: Backend, roster: Roster) -> list[Pair]:
    """Time transfers between the first ranks of the hosts; all ranks must call this together."""
    first = [roster.host_of_rank.index(host) for host in range(len(roster.hosts))]
    size = 64 * _MB if backend.device.type == "cuda" else 16 * _MB
    games = rounds(len(first))
    received = [0.0] * 2 * len(games)  # both directions
    for number, game in enumerate(games):
        backend.barrier()
        for pair in game:
            for back, (source, target) in enumerate((pair, pair[::-1])):
                if backend.rank in (first[source], first[target]):
                    speed = _time_way(backend, first[source], first[target], size)
                    if backend.rank == first[target]:
                        received[2 * number + back] = speed
    speeds = gather_numbers(backend, received)
    return [
        Pair(roster.hosts[source], roster.hosts[target], speeds[first[target]][2 * number + back])
        for number, game in enumerate(games)
        for pair in game
        for back, (source, target) in enumerate((pair, pair[::-1]))
    ]


def _time_way(backend: Backend, source: int, target: int, size: int) -> float:
    """Return the transfer speed in GB/s, valid at the target; both ranks must call this."""
    load = torch.zeros(size // 4, device=backend.device)
    signal = torch.zeros(1, device=backend.device)

    def send() -> Tensor:
        backend.send_recv(signal, target, source)  # from here on, the target waits
        backend.send_recv(load, source, target)
        return load

    send()  # the first call opens the connection
    return size / _median(backend.device, send, _PAIR_REPEATS, lambda: None) / 1e9


def judge_sums(sums: Sums) -> Finding:
    """Return a finding on whether the sums were exact."""
    if sums.wrong:
        return Finding(
            "all-reduce",
            PROBLEM,
            f"a wrong sum over {sums.transport} at {ranks_text(sums.wrong)}: training there "
            "computes wrong gradients",
            (
                "leave the hosts of these ranks out (srun --exclude=HOSTS); report them to the "
                "administrators",
            ),
            tuple(sums.wrong),
        )
    return Finding("all-reduce", OK, f"exact sums at all ranks over {sums.transport}", ranks=(0,))


def judge_pairs(pairs: Sequence[Pair]) -> list[Finding]:
    """Return a warning for each host, or pair of hosts, at less than half of the median speed.

    A host is slow if even its fastest transfer is slow compared with those of the other hosts. The
    warning then names the host, not each of its pairs. The comparison needs three hosts.

    Args:
        pairs: results of `run_pairs`.
    """
    if len({pair.source for pair in pairs}) < 3:
        return []
    found = []
    rest = list(pairs)
    for end, verb in (("source", "sends"), ("target", "receives")):
        best: dict[str, float] = {}
        for pair in pairs:
            host = getattr(pair, end)
            best[host] = max(best.get(host, 0.0), pair.speed)
        median = statistics.median(best.values())
        for host, speed in best.items():
            if speed < median / 2:
                rest = [pair for pair in rest if getattr(pair, end) != host]
                text = f"{host} {verb} at most {speed:.3g} GB/s; the median host {median:.3g} GB/s"
                found.append(_slow(text, host))
    median = statistics.median(pair.speed for pair in rest)
    return found + [
        _slow(
            f"{pair.source} to {pair.target}: {pair.speed:.3g} GB/s; the median pair "
            f"{median:.3g} GB/s",
            pair.target,
        )
        for pair in rest
        if pair.speed < median / 2
    ]


def _slow(text: str, host: str) -> Finding:
    fixes = (
        f"leave it out: srun --exclude={printable(host)}",
        "look at its link with ethtool or ibstat",
    )
    return Finding("slow network", WARNING, printable(text), fixes)
