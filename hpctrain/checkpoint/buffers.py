"""Copies of the state between two steps, in memory that is reused from save to save."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.snapshot import Snapshot, key_of, storages_in
from hpctrain.cluster.memory import available
from hpctrain.cluster.texts import first_line
from hpctrain.process.logging import logger

__all__ = ["Buffers"]

# Share of the available memory that a copy may use: training continues to allocate memory.
_SHARE = 0.9
_TOLD = 100_000_000  # bytes from which on the memory is worth a line in the log
_CHUNK = 4 << 20  # bytes that a thread copies at a time
_MOST_THREADS = 4  # more than the memory of a host serves


class Buffers:
    """Host memory for copies of a state, reused from one save to the next.

    Each storage is copied once and completely, so views stay views. GPU storages are copied to
    pinned memory in the order of the current stream, so the caller may change them immediately.
    Memory that the last save did not use is freed.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[tuple[int, bool], Tensor]] = []  # each with its size and kind
        self._last_kind = ""

    def copy(self, snapshot: Snapshot) -> bool:
        """Replace the tensors of a snapshot by copies; return False if there is no memory."""
        storages = storages_in(snapshot)
        with torch.inference_mode(mode=False), torch.no_grad():
            sources = snapshot.sources()
            buffers = self._take([(s.numel(), s.is_cuda) for s in sources])
            if buffers is None:
                return False
            on_host = []
            for source, buffer in zip(sources, buffers, strict=True):
                if source.is_cuda:
                    buffer.copy_(source, non_blocking=True)
                elif source.device.type == "mps":
                    buffer.copy_(source)
                else:
                    on_host.append((buffer.numpy(), source.numpy()))
            _copy(on_host)
            copies = {
                key: buffer.untyped_storage()
                for key, buffer in zip(storages, buffers, strict=False)
            }
            for part in snapshot.parts.values():
                for number in part.plain:
                    tensor = part.tensors[number]
                    part.tensors[number] = _view_in(copies[key_of(tensor)], tensor)
                for number, entry in part.entries.items():
                    part.tensors[number] = entry.flat = None  # type: ignore[assignment]
            for piece, buffer in zip(snapshot.pieces, buffers[len(storages) :], strict=True):
                piece.source = buffer
            for device in sorted({s.device.index for s in sources if s.is_cuda}):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                snapshot.events.append(event)
        return True

    def _take(self, sizes: Sequence[tuple[int, bool]]) -> list[Tensor] | None:
        """Return one buffer per size in bytes, pinned or not; None if there is no memory."""
        pool: dict[tuple[int, bool], list[Tensor]] = {}
        for size, buffer in self._buffers:
            pool.setdefault(size, []).append(buffer)
        found = [pool[size].pop() if pool.get(size) else None for size in sizes]
        pairs = list(zip(sizes, found, strict=True))
        self._buffers = [(size, buffer) for size, buffer in pairs if buffer is not None]
        pool.clear()
        more = sum(_buffer_bytes(*size) for size, buffer in pairs if buffer is None)
        room = available() if more else None
        if room is not None and more > _SHARE * room:
            self._refuse(f"{_mb(more)} more are needed and {_mb(room)} available")
            return None
        try:
            taken = [_new(*size) if buffer is None else buffer for size, buffer in pairs]
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for lack of memory
            self._refuse(first_line(error))
            return None
        self._buffers = list(zip(sizes, taken, strict=True))
        total = sum(_buffer_bytes(*size) for size in sizes)
        if more and (total >= _TOLD or self._last_kind):
            self._log(
                f"{_mb(total)} of memory hold copies of the state, which a thread writes in the "
                "background"
            )
        return taken

    def _refuse(self, reason: str) -> None:
        self._buffers = []
        self._log(
            "no memory for a copy of the state, so training waits while a checkpoint is written: "
            + reason,
            warn=True,
        )

    def _log(self, text: str, warn: bool = False) -> None:
        """Log a text, unless the last one was of the same kind."""
        kind = text.partition(":")[0]
        if kind != self._last_kind:
            (logger.warning if warn else logger.info)("%s", text)
        self._last_kind = kind


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy arrays of bytes, with as many threads as torch has.

    Args:
        pairs: a target and a source each.
    """
    # torch's own threads synchronize after each tensor, which takes seconds on a busy host.
    work = deque(
        (target[at : at + _CHUNK], source[at : at + _CHUNK])
        for target, source in pairs
        for at in range(0, len(target), _CHUNK)
    )

    def copy() -> None:
        with suppress(IndexError):
            while True:
                target, source = work.popleft()
                target[:] = source

    count = min(torch.get_num_threads(), _MOST_THREADS) if len(work) > 1 else 1
    threads = [threading.Thread(target=copy) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    copy()
    for thread in threads:
        thread.join()


def _new(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _buffer_bytes(size: int, pinned: bool) -> int:
    """Return the bytes that a buffer needs: torch rounds pinned memory up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


def _view_in(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Return the same view of another storage."""
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
