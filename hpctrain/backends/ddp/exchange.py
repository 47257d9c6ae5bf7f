"""A few words of every rank for every rank, apart from the collectives.

Collectives have no names: where one rank sums gradients and another one a loss, gloo takes the one
for the other, and ends the process. So ranks first say here what they are about to do.
"""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["by_messages", "by_store"]

_TAG = 0x6870  # gloo keeps messages with tags apart from collectives; "hp"


def by_messages(rank: int, size: int, words: str) -> list[str]:
    """Over gloo, which notices at once when a rank is gone; waits for all.

    Args:
        rank, size: of this process in the default group.
        words: of this rank.

    Raises:
        RuntimeError: a rank is gone, or has not come within the group's time-out.
    """
    return _through_rank_0(rank, size, words, _send, _receive)


def by_store(store: Store, number: int, rank: int, size: int, words: str) -> list[str]:
    """Over a store, for NCCL, whose messages have no tags; waits for all.

    Args:
        store: with no other keys.
        number: of this exchange, which all ranks count.
        rank, size: of this process.
        words: of this rank.

    Raises:
        RuntimeError: a rank has not come within the store's time-out, or rank 0 is gone.
    """
    said = _through_rank_0(
        rank,
        size,
        words,
        lambda text, to: store.set(f"{number}/{rank}-{to}", text),
        lambda other: store.get(f"{number}/{other}-{rank}").decode(),
    )
    if rank == 0:  # all ranks have come here, so nobody reads what is older
        for other in range(1, size):
            store.delete_key(f"{number}/{other}-0")
            store.delete_key(f"{number - 1}/0-{other}")
    return said


def _through_rank_0(
    rank: int,
    size: int,
    words: str,
    send: Callable[[str, int], None],
    receive: Callable[[int], str],
) -> list[str]:
    if rank:
        send(words, 0)
        said: list[str] = json.loads(receive(0))
        return said
    said = [words, *(receive(other) for other in range(1, size))]
    for other in range(1, size):
        send(json.dumps(said), other)
    return said


def _send(text: str, to: int) -> None:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(data)]), to, tag=_TAG)
    dist.send(data, to, tag=_TAG)


def _receive(other: int) -> str:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, other, tag=_TAG)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, other, tag=_TAG)
    return data.numpy().tobytes().decode()
