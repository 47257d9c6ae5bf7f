"""The state between two steps: its structure, its plain values, and its tensors."""

import io
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.backends.extent import Extent
from hpctrain.cluster.texts import first_line
from hpctrain.errors import UsageError

__all__ = [
    "Entry",
    "Part",
    "Piece",
    "Snapshot",
    "filled",
    "freeze",
    "key_of",
    "storages_in",
    "tensors_in",
]


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
        events: CUDA events that must complete before the copies may be read.
    """

    parts: dict[str, Part]
    pieces: list[Piece] = field(default_factory=list)
    writers: set[int] = field(default_factory=set)
    events: list[torch.cuda.Event] = field(default_factory=list)

    def sources(self) -> list[Tensor]:
        """Return the memory of all tensors that are written, as bytes."""
        storages = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages_in(self).values()
        ]
        return [*storages, *(piece.source for piece in self.pieces)]

    def ready(self) -> None:
        """Wait until the copies from GPUs are complete."""
        for event in self.events:
            event.synchronize()


def tensors_in(value: Any) -> tuple[bytes, list[Any]]:
    """Return the structure of a value, and its tensors by number.

    Raises:
        Exception: the value cannot be pickled; of many types.
    """
    tensors: list[Any] = []
    numbers: dict[int, int] = {}

    def number_of(thing: Any) -> int | None:
        if not isinstance(thing, Tensor) and not torch.is_storage(thing):
            return None
        # The list keeps the tensors alive, so that no other object can get the same id.
        number = numbers.setdefault(id(thing), len(tensors))
        if number == len(tensors):
            tensors.append(thing)
        return number

    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = number_of  # type: ignore[method-assign]
    pickler.dump(value)
    return file.getvalue(), tensors


def filled(structure: bytes, tensors: Sequence[Any]) -> Any:
    """Return the value of a structure, with these things in the place of its tensors."""
    unpickler = pickle.Unpickler(io.BytesIO(structure))  # noqa: S301, of `tensors_in`
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


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
    parts, extents = {}, extents or {}
    checked = {} if checked is None else checked
    for name, value in state.items():
        try:
            structure, tensors = tensors_in(value)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise _refused(name, _culprit(value) or first_line(error)) from None
        if checked.get(name) != structure:
            # Check the structure only; the content of the tensors does not matter.
            empty = [torch.empty(0, device="cpu")] * len(tensors)
            try:
                _loaded(filled(structure, empty))
            except Exception as error:  # the user's classes may raise any error
                raise _refused(name, _culprit(value) or first_line(error)) from None
        checked[name] = structure
        plain = [number for number, tensor in enumerate(tensors) if _plain(tensor)]
        entries = _entries(value, tensors, plain, extents)
        for number, tensor in enumerate(tensors):
            extent = extents.get(id(tensor))
            if number not in entries and extent is not None and not extent.all:
                kind = f"a {type(tensor).__name__} that is divided among the ranks"
                raise _refused(name, kind)
        for number in set(range(len(tensors))).difference(plain):
            try:
                tensors[number] = _loaded(tensors[number])
            except Exception as error:
                raise _refused(name, first_line(error)) from None
        plain = [number for number in plain if number not in entries]
        parts[name] = Part(structure, tensors, plain, entries)
    snapshot = Snapshot(parts)
    storages_in(snapshot)  # raises the error of memory that tensors of several types share
    return snapshot


def _entries(
    value: Any, tensors: Sequence[Any], plain: Sequence[int], extents: Mapping[int, Extent]
) -> dict[int, Entry]:
    """Return the tensors whose elements go to the data files, by number.

    Views that share memory stay together in the file of the part, unless other ranks hold them,
    too: then they are weights or states, which a load copies.
    """
    names = dict(_names(value, ""))
    uses = Counter(key_of(tensors[number]) for number in plain)
    first: dict[Any, int] = {}
    entries = {}
    for number in plain:
        tensor = tensors[number]
        extent = extents.get(id(tensor))
        if extent is None and not (
            type(tensor) is Tensor
            and not tensor.requires_grad
            and uses[key_of(tensor)] == 1
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        ):
            continue
        order, ordered = None, tensor.detach()
        if not tensor.is_contiguous():
            dimensions = range(tensor.dim())
            order = tuple(sorted(dimensions, key=tensor.stride().__getitem__, reverse=True))
            ordered = ordered.permute(order)
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


def _loaded(value: Any) -> Any:
    """Return a value after `torch.save` and `torch.load`, as in a checkpoint."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _culprit(value: Any, path: str = "") -> str:
    """Return the place and class of the first value that cannot be loaded; empty if none is found.

    torch's own error says neither.
    """
    if isinstance(value, Mapping):
        places = value.items()
    elif isinstance(value, (list, tuple)):
        places = dict(enumerate(value)).items()
    else:
        try:
            _loaded(torch.empty(0) if isinstance(value, Tensor) else value)
        except Exception:
            kind = type(value)
            return f"{path or 'it'} is a {kind.__module__}.{kind.__qualname__}"
        return ""
    found = (_culprit(one, f"{path}[{key!r}]" if path else str(key)) for key, one in places)
    return next(filter(None, found), "")


def _refused(part: str, reason: str) -> UsageError:
    return UsageError("HT706.not-restorable", part=part, reason=reason)


def _plain(tensor: Any) -> bool:
    """Return whether a tensor is only a view of a storage that can be copied as bytes."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


def storages_in(snapshot: Snapshot) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all plain tensors, each once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for name, part in snapshot.parts.items():
        types: dict[int, torch.dtype] = {}
        for tensor in (part.tensors[number] for number in part.plain):
            storages.setdefault(key_of(tensor), tensor.untyped_storage())
            if types.setdefault(key_of(tensor), tensor.dtype) != tensor.dtype:
                raise _refused(name, "tensors of different types that share memory")
    return storages


def key_of(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share a storage."""
    return int(tensor.untyped_storage()._cdata)
