"""How many threads does a rank compute with, and has it the cores for them?"""

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from hpctrain.process.logging import logger

__all__ = ["Threads"]

# Whoever sets one of these has decided.
_DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# Each keeps batches in memory, and more of them feed no GPU of today any faster.
_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Threads:
    """The cores of a rank and what somebody decided; it travels with the rendezvous.

    Attributes:
        cores: a bit for each core that the process may run on: its affinity, which a scheduler or
            taskset sets.
        decided: the number of threads, where the environment has one.
        before: the number of threads that torch began with.
    """

    cores: int
    decided: int | None
    before: int

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Self:
        """Of this process."""
        before = torch.get_num_threads()
        decided = before if any(env.get(name) for name in _DECIDED) else None
        return cls(sum(1 << core for core in os.sched_getaffinity(0)), decided, before)

    def entry(self) -> dict[str, Any]:
        """What the other ranks are told."""
        return {"cores": f"{self.cores:x}", "threads": self.decided}

    def fit(
        self,
        entries: Sequence[Mapping[str, Any]],
        host_of_rank: Sequence[int],
        rank: int,
        workers: int | str,
    ) -> int:
        """Divide cores among the ranks that share them, where nobody has decided; warn of too few.

        By default torch takes a thread for each core that it may use, and so would every rank on
        the same cores.

        Args:
            entries: by rank, what `entry` said.
            host_of_rank: by rank, the index of its host.
            rank: this one; rank 0 speaks for all.
            workers: loader processes of each rank; "auto" leaves one core for the rank itself.

        Returns:
            The loader processes of this rank.
        """
        shares = _shares(entries, host_of_rank)
        share = shares[rank]
        if self.decided is None and share < self.cores.bit_count():
            torch.set_num_threads(min(share, self.before))
        if rank == 0:
            _tell(entries, shares)
            _warn(entries, shares, 0 if isinstance(workers, str) else workers)
        return min(max(share - 1, 1), _MOST_WORKERS) if isinstance(workers, str) else workers

    def put_back(self) -> None:
        """As before the session."""
        torch.set_num_threads(self.before)


def _shares(entries: Sequence[Mapping[str, Any]], host_of_rank: Sequence[int]) -> list[int]:
    """By rank, the cores that it has when all who may run on the same ones divide them."""
    on_host: dict[int, Counter[int]] = defaultdict(Counter)
    cores = [int(entry["cores"], 16) for entry in entries]
    for host, mask in zip(host_of_rank, cores, strict=True):
        on_host[host][mask] += 1
    return [
        max(1, mask.bit_count() // sum(n for other, n in on_host[host].items() if other & mask))
        for host, mask in zip(host_of_rank, cores, strict=True)
    ]


def _tell(entries: Sequence[Mapping[str, Any]], shares: Sequence[int]) -> None:
    """Which ranks got fewer threads than torch would have taken."""
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


def _warn(entries: Sequence[Mapping[str, Any]], shares: Sequence[int], workers: int) -> None:
    """Threads or loader workers that are more than the cores take turns."""
    short: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, (entry, share) in enumerate(zip(entries, shares, strict=True)):
        threads = entry["threads"] or share
        if max(workers, threads) > share:
            short[share, threads].append(rank)
    for (share, threads), ranks in short.items():
        logger.warning(
            "too few cores for %d rank%s, the first rank %d on %s: each has %d, for %d threads and "
            "%d loader workers; fix: fewer --workers, or export OMP_NUM_THREADS=%d, or in a "
            "Slurm job srun --cpus-per-task=%d    (it does not take that from sbatch)",
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
