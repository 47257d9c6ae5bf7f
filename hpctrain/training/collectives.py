"""Collectives of a session: tensors and objects of all ranks, and what one rank does first."""

import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpctrain.backends.base import Backend
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process.events import Events
from hpctrain.process.phases import EVALUATING, WAITING
from hpctrain.process.pytree import map_tensors
from hpctrain.training.consensus import ask, first_error, meet, on_rank_zero, refuse_unlike_answers
from hpctrain.training.tensor_exchange import all_rows, as_bytes, exchange, joined, reduced

__all__ = ["Collectives"]

T = TypeVar("T")

_OPS = ("sum", "mean", "max", "min")
_GATHER, _NO_BATCH = "session.gather_for_metrics() of ", "no batch left in an evaluation"
_HEADER_BYTES = 16  # two int64


class Collectives:
    """Collectives of a session: all ranks make the same calls in the same order.

    They work over every backend, with tensors on the CPU or the device of the rank, and also in one
    process.

    Attributes:
        backend: backend for the communication between ranks.
        world: rank, world size and hosts of this process.
    """

    backend: Backend
    world: World
    _events: Events

    def __init__(self) -> None:
        self._known: set[str] = set()  # calls on which the ranks have agreed
        self._gathered = False  # whether gather_for_metrics was called in this evaluation

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce each element of a tensor over all ranks.

        Half precision is summed in float32. The ranks compare type and shape when they are new; a
        later call costs one exchange.

        Args:
            tensor: tensor of the same type and shape on all ranks; it does not change.
            op: "sum", "mean", "max" or "min". NaN on any rank gives NaN.

        Returns:
            A new tensor on the device of the given one, without a gradient. It has the same type,
            but sums of whole numbers and of booleans are int64, as in `torch.sum`.

        Raises:
            UsageError: another op, no tensor, a mean of whole numbers, or a maximum of complex
                ones; or other ranks do something else.
        """
        call = f"session.all_reduce(…, {op!r})"
        _check_tensor(call, tensor)
        if op not in _OPS:
            raise UsageError("HT631.unknown-op", call=call, ops=", ".join(_OPS))
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UsageError("HT631.mean-of-integers", call=call, tensor=tensor)
        if op in ("max", "min") and tensor.is_complex():
            raise UsageError("HT631.complex-not-ordered", call=call, tensor=tensor, op=op)
        self._agree(f"{call} of {_described(tensor)}")
        return reduced(self.backend, tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks along their first dimension, with gradients.

        In the backward pass, the gradient of each row is summed over the ranks and goes to the rank
        of the row. So the loss of every rank depends on the result, or that of none. `session.step`
        averages the ranks. The weights get the gradient of one process that has all rows, without
        another factor, if the mean of the losses of the ranks is the loss of that process: each
        rank computes the mean loss of its own rows (as many on all ranks), or each the loss of all.

        Args:
            tensor: tensor of shape (N, …); N may differ between ranks, and may be 0. A tensor of
                shape () counts as one row.

        Returns:
            A new tensor of shape (sum of N, …), in the order of ranks, on the device of the given
            one.

        Raises:
            UsageError: no tensor, or the ranks have other types, shapes or needs of a gradient.
        """
        _check_tensor("session.all_gather()", tensor)
        tensor = _rows(tensor)
        gradient = " with a gradient" if tensor.requires_grad and torch.is_grad_enabled() else ""
        call = f"session.all_gather() of {_described_rows(tensor)}{gradient}"
        self._agree(call)
        header = torch.tensor([len(tensor), zlib.crc32(call.encode())])
        headers = exchange(self.backend, as_bytes(header), [_HEADER_BYTES] * self.world.world_size)
        lengths, calls = torch.stack(headers).view(torch.int64).T.tolist()
        if len(set(calls)) > 1:
            self._wait(call)
        return all_rows(self.backend, tensor, lengths)

    def gather_for_metrics(self, things: T) -> T:
        """Concatenate the samples of all ranks, for a metric that needs them all.

        In a loop over `session.loader(dataset, train=False)` the samples come in the order of the
        data set, each one once. A rank without a batch in the last round takes part with no sample;
        it does not get the samples of that round. Rank 0 gets all.

        Args:
            things: tensors of shape (samples, …) in tuples, lists, dicts and dataclasses, with the
                same types and shapes on all ranks, except for the number of samples. A tensor of
                shape () counts as one sample. None stays None. A list of dicts is a list of
                samples, such as the boxes, labels and scores of each image: its dicts may hold
                anything that can be pickled.

        Returns:
            The same structure with new tensors, without gradients, each on its device; a list of
            samples has those of all ranks, with their tensors on the device of the session.

        Raises:
            UsageError: the structure holds something else, a list has tensors of different numbers
                of samples, or other ranks do something else.
        """
        tensors: list[Tensor] = []
        packed: set[int] = set()  # which of them are lists of samples

        def described(tensor: Tensor) -> _Text:
            tensors.append(_rows(tensor.detach()))
            return _Text(_described_rows(tensors[-1]))

        def described_list(samples: list[Any]) -> Any:
            if _is_samples(samples):
                packed.add(len(tensors))
                tensors.append(_packed(samples))
                return _Text("a dict for each sample")
            _refuse_unlike_rows(samples)
            return NotImplemented

        shape = map_tensors(described, things, _refuse_value, described_list)
        call = f"{_GATHER}{shape}"
        sent = [as_bytes(tensor).to(self.backend.device) for tensor in tensors]
        self._gathered = True
        self._events.heartbeat.enter(WAITING)
        answers = ask(self.backend, call, json.dumps([len(one) for one in sent]))
        if {one.doing for one in answers} - {call, _NO_BATCH}:
            refuse_unlike_answers(answers)
        sizes = [json.loads(one.note) for one in answers]
        own = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8)
        gathered = exchange(self.backend, own, [sum(those) for those in sizes])
        self._events.heartbeat.enter(EVALUATING)
        parts = [
            torch.split(one, those) for one, those in zip(gathered, sizes, strict=True) if those
        ]
        columns = enumerate(zip(tensors, *parts, strict=True))
        results = iter(
            [
                self._unpacked(column) if number in packed else joined(column, tensor)
                for number, (tensor, *column) in columns
            ]
        )

        def replaced(samples: list[Any]) -> Any:
            return next(results) if _is_samples(samples) else NotImplemented

        result: T = map_tensors(lambda _: next(results), things, at_list=replaced)
        return result

    def _unpacked(self, parts: Sequence[Tensor]) -> list[Any]:
        """Return the samples of all ranks, from the bytes of each."""
        lists = [pickle.loads(part.cpu().numpy().tobytes()) for part in parts if len(part)]  # noqa: S301, as it is our own
        return [
            map_tensors(lambda tensor: tensor.to(self.backend.device), sample)
            for samples in lists
            for sample in samples
        ]

    def _take_part(self, idle: bool) -> None:
        """Take part in `gather_for_metrics` of ranks that still have a batch in an evaluation.

        Args:
            idle: whether a rank has no batch at all. It cannot know whether the others gather.
        """
        doings = {_NO_BATCH} if self._gathered or idle else set()
        while doings:
            self._events.heartbeat.enter(WAITING)
            answers = ask(self.backend, _NO_BATCH, "[]")
            doings = {one.doing for one in answers} - {_NO_BATCH}
            if len(doings) > 1 or not all(one.startswith(_GATHER) for one in doings):
                refuse_unlike_answers(answers)
            if doings:
                counts = [sum(json.loads(one.note)) for one in answers]
                exchange(self.backend, torch.empty(0, dtype=torch.uint8), counts)
        self._events.heartbeat.enter(EVALUATING)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return a copy of one rank's tensor on every rank.

        Args:
            tensor: tensor of the same type and shape on all ranks; it does not change.
            source: rank whose values are sent.

        Returns:
            A new tensor on the device of the given one, without a gradient.

        Raises:
            UsageError: no tensor, no such rank, or other ranks do something else.
        """
        _check_tensor("session.broadcast()", tensor)
        self._check_source("broadcast", source)
        self._wait(f"session.broadcast() of {_described(tensor)} from rank {source}")
        sent = as_bytes(tensor.detach()).to(self.backend.device, copy=True)
        self.backend.broadcast([sent], source)
        return sent.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def broadcast_object(self, thing: T, source: int = 0) -> T:
        """Return one rank's object on every rank.

        Args:
            thing: object that can be pickled; those of other ranks are ignored.
            source: rank whose object is sent.

        Raises:
            UsageError: no such rank, or other ranks do something else.
        """
        self._check_source("broadcast_object", source)
        self._wait(f"session.broadcast_object() from rank {source}")
        return self.backend.broadcast_object(thing, source)

    def gather_object(self, thing: T) -> list[T]:
        """Return the objects of all ranks, in the order of ranks, on every rank.

        Args:
            thing: object that can be pickled.

        Raises:
            UsageError: other ranks do something else.
        """
        self._wait("session.gather_object()")
        return self.backend.broadcast_object(self.backend.gather_object(thing))

    def barrier(self) -> None:
        """Wait until all ranks have called this; it does not wait for the work of a GPU.

        Raises:
            UsageError: other ranks do something else.
        """
        self._wait("session.barrier()")

    def print(self, *things: Any, **options: Any) -> None:
        """Print on rank 0 only; the other ranks need not call it.

        Args:
            things: what to print, as for Python's `print`.
            options: keyword arguments of Python's `print`.
        """
        if self.backend.rank == 0:
            print(*things, **options)  # noqa: T201

    def on_main(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on every rank.

        The other ranks wait, up to `--timeout` seconds. An error on rank 0 is raised on all ranks.

        Args:
            function: called on rank 0, without arguments; it calls no collective. Its result can be
                pickled.

        Raises:
            UsageError: other ranks do something else.
        """
        self._wait("session.on_main()")
        if self.world.world_size == 1:
            return function()
        own: list[T] = []

        def act() -> bytes:
            own.append(function())
            return pickle.dumps(own[0])  # here, so that all ranks get the error if it fails

        sent = on_rank_zero(self.backend, act)
        result: T = own[0] if own else pickle.loads(sent)  # noqa: S301, as rank 0 has sent it
        return result

    @contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Run a block first on local rank 0 of each host, and then on the other ranks.

        Example: a download to the disk of the host, which the other ranks find complete. The other
        ranks wait, up to `--timeout` seconds. An error in the block of a local rank 0 is raised on
        all ranks.

        Raises:
            UsageError: other ranks do something else.
        """
        if self.world.local_rank:
            self._end_local_mains(None)
            yield
            return
        try:
            yield
        except (Exception, SystemExit) as error:
            self._end_local_mains(error)
            raise
        self._end_local_mains(None)

    def _end_local_mains(self, error: BaseException | None) -> None:
        """Wait for local rank 0 of each host; raise the error of one, unless this rank has one."""
        self._wait("session.local_main_first()")
        first = first_error(self.backend, error)
        if first is not None and error is None:
            raise first

    def _wait(self, call: str) -> None:
        """Wait for all ranks before an exchange, and check that they make the same call."""
        meet(self.backend, call, self._events)

    def _agree(self, call: str) -> None:
        """Check that all ranks make the same call when it is new, as a check takes time."""
        if call not in self._known:
            self._wait(call)
            self._known.add(call)

    def _check_source(self, name: str, source: int) -> None:
        if source not in range(self.world.world_size):
            raise UsageError("HT631.source-not-a-rank", name=name, source=source, world=self.world)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor[None]


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _described_rows(rows: Tensor) -> str:
    """Describe rows without their number, such as `float32 (N, 10)`."""
    return _described(rows[:0]).replace("(0,)", "(N,)").replace("(0, ", "(N, ")


class _Text(str):
    """A text that stands without quotes in the text of a structure."""

    __slots__ = ()
    __repr__ = str.__str__


def _check_tensor(call: str, thing: Any) -> None:
    if not isinstance(thing, Tensor):
        raise UsageError("HT631.not-a-tensor", call=call, kind=type(thing).__name__)
    if thing.layout != torch.strided:
        raise UsageError("HT631.sparse-tensor", call=call)


def _is_samples(things: list[Any]) -> bool:
    return bool(things) and all(isinstance(one, dict) for one in things)


def _packed(samples: list[Any]) -> Tensor:
    """Return samples as bytes, of shape (bytes,)."""
    copies = map_tensors(lambda tensor: tensor.detach().cpu().clone(), samples)
    return torch.frombuffer(bytearray(pickle.dumps(copies)), dtype=torch.uint8)


def _refuse_unlike_rows(things: list[Any]) -> None:
    """Refuse a list of tensors that are those of a sample each, instead of all samples each."""
    rows = {len(_rows(one)) for one in things if isinstance(one, Tensor)}
    if len(rows) > 1:
        raise UsageError("HT631.rows-differ", rows=sorted(rows))


def _refuse_value(value: Any) -> None:
    """Refuse a value that is no tensor, in a structure of samples; None may stay."""
    if value is not None:
        raise UsageError("HT631.not-samples", kind=type(value).__name__)
