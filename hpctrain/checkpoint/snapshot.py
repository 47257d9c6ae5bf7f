"""Copies of the state between two steps, in memory that is reused from save to save."""

import io
import pickle
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.backends.extent import Extent
from hpctrain.cluster.memory import available
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["Buffers", "Entry", "Part", "Piece", "Snapshot", "filled", "freeze", "tensors_in"]

# Share of the available memory that a copy may use: training continues to allocate memory.
_SHARE = 0.9
_CHUNK = 4 << 20  # bytes that a thread copies at a time
_MOST_THREADS = 4  # more than the memory of a host serves
# Expected state and fixes in a UsageError.
_EXPECTED = "tensors and plain values in every state_dict()"
_FIXES = "float(x) for a number of NumPy's", "strings and lists for objects"


@dataclass(slots=True)
class Entry:
    """A tensor whose elements are in the data files.

    Attributes:
        name: path of the tensor in its part, for readers.
        dtype: type of its elements.
        extent: what this rank holds of it.
        shared: whether other ranks hold it, too, or another part of it.
        order: dimensions in the order of memory; None for row-major.
        flat: what this rank holds, as one dimension in the order of memory.
        same: number of an earlier tensor with the same memory; None if there is none.
    """

    name: str
    dtype: torch.dtype
    extent: Extent
    shared: bool
    order: tuple[int, ...] | None
    flat: Tensor
    same: int | None


@dataclass
class Part:
    """A part of the state: its pickled structure and its tensors.

    Attributes:
        structure: pickle of the value, without tensors.
        tensors: tensors by number.
        plain: numbers of those that the file of the part contains, and that can be copied as bytes.
        entries: those in the data files, by number.
    """

    structure: bytes
    tensors: list[Any]
    plain: list[int]
    entries: dict[int, Entry] = field(default_factory=dict)

    def value(self) -> Any:
        """Return the value of the part; a tensor in the data files is an empty one without memory.

        Each of those is another object, so that `tensors_in` gives it the same number again.
        """
        return filled(
            self.structure,
            [
                torch.empty(0, device="meta") if number in self.entries else tensor
                for number, tensor in enumerate(self.tensors)
            ],
        )


@dataclass(slots=True)
class Piece:
    """A range of a tensor's elements that this rank writes to its data file.

    Attributes:
        part, number: part of the state, and number of the tensor in it.
        start: first element, in the order of memory.
        source: bytes of the elements.
        item: bytes of an element.
    """

    part: str
    number: int
    start: int
    source: Tensor
    item: int


@dataclass
class Snapshot:
    """The parts of a state.

    Attributes:
        parts: parts by name.
        pieces: what this rank writes to its data file, in order.
        writers: ranks that write; empty before `data_files.plan`.
        copied: whether the tensors are copies; otherwise they are the caller's tensors.
        events: CUDA events that must complete before the copies may be read.
    """

    parts: dict[str, Part]
    pieces: list[Piece] = field(default_factory=list)
    writers: set[int] = field(default_factory=set)
    copied: bool = False
    events: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all tensors that are written; a storage that several share counts once."""
        return sum(source.numel() for source in self.sources())

    def sources(self) -> list[Tensor]:
        """Return the memory of all tensors that are written, as bytes."""
        storages = [_bytes(storage) for storage in _storages(self).values()]
        return [*storages, *(piece.source for piece in self.pieces)]

    def ready(self) -> None:
        """Wait until the copies from GPUs are complete."""
        for event in self.events:
            event.synchronize()


class _Finder(pickle.Pickler):
    """Pickler for the structure of a value, which collects its tensors separately."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Tensor) and not torch.is_storage(thing):
            return None
        # The list keeps the tensors alive, so that no other object can get the same id.
        number = self._numbers.setdefault(id(thing), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(thing)
        return number


class _Filler(pickle.Unpickler):
    """Unpickler that combines a structure with tensors; inverse of `_Finder`."""

    def __init__(self, structure: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def tensors_in(value: Any) -> tuple[bytes, list[Any]]:
    """Return the structure of a value, and its tensors by number.

    Raises:
        Exception: the value cannot be pickled; of many types.
    """
    file = io.BytesIO()
    finder = _Finder(file)
    finder.dump(value)
    return file.getvalue(), finder.tensors


def filled(structure: bytes, tensors: Sequence[Any]) -> Any:
    """Return the value of a structure, with these things in the place of its tensors."""
    return _Filler(structure, tensors).load()


def freeze(
    state: Mapping[str, Any],
    checked: dict[str, bytes] | None = None,
    extents: Mapping[int, Extent] | None = None,
) -> Snapshot:
    """Copy the structure and the plain values of a state, but not yet its plain tensors.

    Args:
        state: values by name of the part.
        checked: structures by name of the part that need no new check; updated here.
        extents: for tensors that other ranks hold, too, or hold another part of: what this rank
            holds, by the tensor's id. All other tensors are of rank 0 alone.

    Raises:
        UsageError: the state contains values that `torch.save`, or `torch.load` with
            `weights_only`, refuses. So the error occurs at the save, not at the load.
    """
    parts = {}
    for name, value in state.items():
        try:
            structure, tensors = tensors_in(value)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise _refused(name, error) from None
        if checked is None or checked.get(name) != structure:
            # Check the structure only; the content of the tensors does not matter.
            empty = [torch.empty(0, device="cpu")] * len(tensors)
            _round_trip(name, filled(structure, empty))
        if checked is not None:
            checked[name] = structure
        plain = [number for number, tensor in enumerate(tensors) if _plain(tensor)]
        entries = _entries(value, tensors, plain, extents or {})
        for number, tensor in enumerate(tensors):
            extent = (extents or {}).get(id(tensor))
            if number not in entries and extent is not None and not extent.all:
                kind = f"a {type(tensor).__name__} that is divided among the ranks"
                raise _refused(name, TypeError(kind))
        for number in set(range(len(tensors))).difference(plain):
            tensors[number] = _round_trip(name, tensors[number])
        plain = [number for number in plain if number not in entries]
        parts[name] = Part(structure, tensors, plain, entries)
    snapshot = Snapshot(parts)
    _storages(snapshot)  # raises the error of memory that tensors of several types share
    return snapshot


def _entries(
    value: Any, tensors: Sequence[Any], plain: Sequence[int], extents: Mapping[int, Extent]
) -> dict[int, Entry]:
    """Return the tensors whose elements go to the data files, by number.

    Views that share memory stay together in the file of the part, unless other ranks hold them,
    too: then they are weights or states, which a load copies.
    """
    names = dict(_names(value, ""))
    uses = Counter(_key(tensors[number]) for number in plain)
    first: dict[Any, int] = {}
    entries = {}
    for number in plain:
        tensor = tensors[number]
        extent = extents.get(id(tensor))
        if extent is None and not (
            type(tensor) is Tensor
            and not tensor.requires_grad
            and uses[_key(tensor)] == 1
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        ):
            continue
        order = None
        if tensor.is_contiguous():
            flat = tensor.detach().view(-1)
        else:
            dimensions = range(tensor.dim())
            order = tuple(sorted(dimensions, key=tensor.stride().__getitem__, reverse=True))
            ordered = tensor.detach().permute(order)
            if not ordered.is_contiguous():
                continue  # its elements are not dense in memory
            flat = ordered.view(-1)
        where = (flat.data_ptr(), tensor.dtype, tensor.shape, order)
        same = first.setdefault(where, number) if flat.numel() else number
        entries[number] = Entry(
            names.get(id(tensor), str(number)),
            tensor.dtype,
            extent or Extent.whole(tensor.shape, (0,)),
            extent is not None,
            order,
            flat,
            None if same == number else same,
        )
    return entries


def _names(value: Any, path: str) -> Iterator[tuple[int, str]]:
    """Yield id and path of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield id(value), path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _names(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _names(inner, f"{path}.{number}" if path else str(number))


def _round_trip(part: str, value: Any) -> Any:
    """Return a value after `torch.save` and `torch.load`, as in a checkpoint."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the user's classes may raise any error
        raise _refused(part, error) from None


def _refused(part: str, error: Exception) -> UsageError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    found = f"the state of {part!r} contains a value that no checkpoint can restore: {reason}"
    return UsageError("HT706", found, _EXPECTED, *_FIXES)


def _plain(tensor: Any) -> bool:
    """Return whether a tensor is only a view of a storage that can be copied as bytes."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


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
        storages = _storages(snapshot)
        with torch.inference_mode(mode=False), torch.no_grad():
            sources = snapshot.sources()
            buffers = self._take([(s.numel(), s.is_cuda) for s in sources])
            if buffers is None:
                return False
            on_host = []
            for source, buffer in zip(sources, buffers, strict=True):
                if source.is_cuda:
                    buffer.copy_(source, non_blocking=True)
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
                    part.tensors[number] = _view_in(copies[_key(tensor)], tensor)
                for number, entry in part.entries.items():
                    part.tensors[number] = entry.flat = None  # type: ignore[assignment]
            for piece, buffer in zip(snapshot.pieces, buffers[len(storages) :], strict=True):
                piece.source = buffer
            for device in sorted({s.device.index for s in sources if s.is_cuda}):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                snapshot.events.append(event)
        snapshot.copied = True
        return True

    def _take(self, sizes: Sequence[tuple[int, bool]]) -> list[Tensor] | None:
        """Return one buffer per size in bytes, pinned or not; None if there is no memory."""
        pool: dict[tuple[int, bool], list[Tensor]] = {}
        for size, buffer in self._buffers:
            pool.setdefault(size, []).append(buffer)
        found = [pool[size].pop() if pool.get(size) else None for size in sizes]
        self._buffers = [(n, b) for n, b in zip(sizes, found, strict=True) if b is not None]
        pool.clear()
        more = sum(
            _buffer_bytes(*n) for n, buffer in zip(sizes, found, strict=True) if buffer is None
        )
        room = available() if more else None
        if room is not None and more > _SHARE * room:
            self._refuse(f"{_mb(more)} more are needed and {_mb(room)} available")
            return None
        try:
            taken = [
                _new(*size) if buffer is None else buffer
                for size, buffer in zip(sizes, found, strict=True)
            ]
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for lack of memory
            self._refuse((str(error).splitlines() or ["MemoryError"])[0])
            return None
        self._buffers = list(zip(sizes, taken, strict=True))
        if more:
            total = sum(_buffer_bytes(*size) for size in sizes)
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


def _storages(snapshot: Snapshot) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all plain tensors, each once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for name, part in snapshot.parts.items():
        types: dict[int, torch.dtype] = {}
        for tensor in (part.tensors[number] for number in part.plain):
            storages.setdefault(_key(tensor), tensor.untyped_storage())
            if types.setdefault(_key(tensor), tensor.dtype) != tensor.dtype:
                raise _refused(name, TypeError("tensors of different types that share memory"))
    return storages


def _key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share a storage."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
