"""An exchange of short texts between all ranks, separate from the collectives.

Collectives have no names: if one rank sums gradients and another one a loss, gloo confuses the two
and ends the process. So the ranks first exchange here which operation they are about to do.
"""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["by_messages", "by_store"]

_TAG = 0x6870  # "hp"; gloo separates messages with tags from collectives


def by_messages(rank: int, size: int, text: str) -> list[str]:
    """Return the texts of all ranks, sent over gloo, which fails at once when a rank is gone.

    Args:
        rank, size: rank of this process, and number of ranks in the default group.
        text: text of this rank.

    Raises:
        RuntimeError: a rank is gone, or did not call this within the group's time-out.
    """
    return _through_rank_0(rank, size, text, _send, _receive)


def by_store(store: Store, number: int, rank: int, size: int, text: str) -> list[str]:
    """Return the texts of all ranks, sent over a store; for NCCL, whose messages have no tags.

    Args:
        store: store without other keys.
        number: number of this exchange, which all ranks count alike.
        rank, size: rank of this process, and number of ranks.
        text: text of this rank.

    Raises:
        RuntimeError: a rank did not call this within the store's time-out, or rank 0 is gone.
    """
    texts = _through_rank_0(
        rank,
        size,
        text,
        lambda data, to: store.set(f"{number}/{rank}-{to}", data),
        lambda other: store.get(f"{number}/{other}-{rank}").decode(),
    )
    if rank == 0:  # all ranks have called this, so older values are not read again
        for other in range(1, size):
            store.delete_key(f"{number}/{other}-0")
            store.delete_key(f"{number - 1}/0-{other}")
    return texts


def _through_rank_0(
    rank: int,
    size: int,
    text: str,
    send: Callable[[str, int], None],
    receive: Callable[[int], str],
) -> list[str]:
    if rank:
        send(json.dumps(text), 0)  # never empty
        texts: list[str] = json.loads(receive(0))
        return texts
    texts = [text, *(json.loads(receive(other)) for other in range(1, size))]
    for other in range(1, size):
        send(json.dumps(texts), other)
    return texts


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
