"""The number of threads of a rank, and the check that it has enough cores."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from hpctrain.cluster import system
from hpctrain.process.logging import logger

__all__ = ["Threads", "divide"]

# Variables with which the user or the launcher sets the number of threads.
_DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# Each worker keeps batches in memory, and more workers do not make current GPUs faster.
_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Threads:
    """The cores and threads of a rank; the ranks exchange them at the rendezvous.

    Attributes:
        cores: bit mask of the cores that the process may use: its affinity, set by a scheduler or
            taskset.
        decided: number of threads if the environment sets it, else None.
        before: initial number of threads in torch.
    """

    cores: int
    decided: int | None
    before: int

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Self:
        """Read the cores and threads of this process."""
        before = torch.get_num_threads()
        decided = before if any(env.get(name) for name in _DECIDED) else None
        return cls(sum(1 << core for core in system.cores()), decided, before)

    def entry(self) -> dict[str, Any]:
        """Return the values for the other ranks."""
        return {"cores": f"{self.cores:x}", "threads": self.decided}

    def fit(self, share: int, workers: int | str) -> int:
        """Use no more threads than cores, and return the number of loader processes of this rank.

        A number of threads set in the environment is kept. By default torch uses one thread for
        each available core, so ranks on the same cores would start too many threads.

        Args:
            share: number of cores of this rank, from `divide`.
            workers: number of loader processes of each rank; "auto" leaves one core for the rank.
        """
        if self.decided is None and share < self.cores.bit_count():
            torch.set_num_threads(min(share, self.before))
        return min(max(share - 1, 1), _MOST_WORKERS) if isinstance(workers, str) else workers

    def put_back(self) -> None:
        """Restore torch's number of threads."""
        torch.set_num_threads(self.before)


def divide(
    entries: Sequence[Mapping[str, Any]], host_of_rank: Sequence[int], workers: int | str
) -> list[int]:
    """Return each rank's number of cores, divided among the ranks that share them.

    Rank 0 calls it for all ranks, and warns if there are too few cores.

    Args:
        entries: values of `Threads.entry`, by rank.
        host_of_rank: index of the host, by rank.
        workers: as for `Threads.fit`.
    """
    on_host: dict[int, Counter[int]] = defaultdict(Counter)
    cores = [int(entry["cores"], 16) for entry in entries]
    for host, mask in zip(host_of_rank, cores, strict=True):
        on_host[host][mask] += 1
    shares = [
        max(1, mask.bit_count() // sum(n for other, n in on_host[host].items() if other & mask))
        for host, mask in zip(host_of_rank, cores, strict=True)
    ]
    _log_threads(entries, shares)
    _warn_about_cores(entries, shares, 0 if isinstance(workers, str) else workers)
    return shares


def _log_threads(entries: Sequence[Mapping[str, Any]], shares: Sequence[int]) -> None:
    """Log how many ranks have fewer threads than torch's default."""
    divided = {
        rank: share
        for rank, (entry, share) in enumerate(zip(entries, shares, strict=True))
        if entry["threads"] is None and share < int(entry["cores"], 16).bit_count()
    }
    if divided:
        least, most = min(divided.values()), max(divided.values())
        logger.info(
            "OMP_NUM_THREADS is not set: %d of %d ranks share cores and have at most %s "
            "thread%s each",
            len(divided),
            len(entries),
            least if least == most else f"{least} to {most}",
            "s" if most > 1 else "",
        )


def _warn_about_cores(
    entries: Sequence[Mapping[str, Any]], shares: Sequence[int], workers: int
) -> None:
    """Warn about ranks with more threads or loader workers than cores."""
    short: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, (entry, share) in enumerate(zip(entries, shares, strict=True)):
        threads = entry["threads"] or share
        if max(workers, threads) > share:
            short[share, threads].append(rank)
    for (share, threads), ranks in short.items():
        logger.warning(
            "too few cores for %d rank%s, the first rank %d on %s: each has %d, for %d threads and "
            "%d loader workers; fix: fewer --workers, or export OMP_NUM_THREADS=%d, or in a "
            "Slurm job srun --cpus-per-task=%d (it does not take that from sbatch)",
            len(ranks),
            "s" if len(ranks) > 1 else "",
            ranks[0],
            entries[ranks[0]]["host"],
            share,
            threads,
            workers,
            share,
            max(workers, threads),
        )
