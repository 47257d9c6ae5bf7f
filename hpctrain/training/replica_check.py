"""Replica check: weights and optimizer states have the same bits on all ranks.

Averaged gradients keep them equal. They differ if the script moves them on one rank alone, which
shows in the first steps, or after a fault of the hardware that no part of it has reported.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import ReplicaError, UsageError
from hpctrain.process.phases import STEP
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context

__all__ = ["ReplicaCheck"]

# Share of the time of the steps that the digests may take, if the option sets no distance. The
# exchange of a digest takes about a fifth as long again: half a percent together.
_SHARE = 0.004
# The first steps take longer than others, so the distance does not follow from them.
_WARM_UP = 8
# Tensors of one size with at most so many elements are copied together, for fewer kernels.
_SMALL = 2**14
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Names of the values in the consensus: four parts of the digest, their squares, and times.
_VALUES = [f"replicas {number}" for number in range(10)]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sum of the bits of each tensor of this rank at the end of a step.

    Attributes:
        step: number of steps done.
        order: number of each sum's tensor, in the order of `_tensors`.
        by_device: sums on each device, of type int32.
    """

    step: int
    order: Sequence[int]
    by_device: Sequence[Tensor]


class ReplicaCheck:
    """Comparison of weights and optimizer states between the ranks of a run.

    `compare` waits for all ranks. Between its calls, a digest of 64 bits joins the consensus of the
    ranks about their next steps: no step waits for it, and all ranks read the result at the same
    step. Any flipped bit changes the digest, and so do any two in different tensors.

    Args:
        context: context of the training.
        seconds: total seconds of each phase of the loop; the watchdog counts them.
        step: number of steps done.
        resumed: whether the run goes on from a checkpoint, at which the ranks had the same state.

    Attributes:
        due: step from which on the next digest joins the consensus.
        forced: step at which there has to be a consensus for it; `sys.maxsize` if there is none.
    """

    def __init__(
        self, context: Context, seconds: Sequence[float], step: int, resumed: bool
    ) -> None:
        self._context, self._seconds = context, seconds
        self._agreed = step if resumed else None  # newest step with the same state on all ranks
        self._every = context.options.check_replicas_every
        self._taken: deque[_Sums] = deque()  # those whose digest is in a sum under way
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.due = self.forced = sys.maxsize
        self._none = context.backend.world_size == 1 or context.backend.sharded
        if context.backend.sharded and self._every:
            raise UsageError("HT319.check-replicas", every=self._every, backend=context.backend)
        if not self._none:
            self._plan(step, _WARM_UP)
        self._begin_interval(step)

    def compare(self, step: int) -> None:
        """Compare the ranks now; called by all of them, which wait for each other.

        This reads all tensors once, and exchanges 4 bytes per tensor.

        Args:
            step: number of steps done.

        Raises:
            UsageError: they differ, and have not been equal since the run began; or their
                optimizers have different settings.
            ReplicaError: they differ now.
        """
        context = self._context
        if context.backend.world_size == 1:
            return
        if context.backend.sharded:
            seen = context.backend.gather_object(_settings(context))
            on_rank_zero(context.backend, lambda: _refuse_other_settings(seen))
            return
        self._refuse_unlike(self._sums(step))
        self._agreed = step
        self._begin_interval(step)

    def values(self, step: int) -> dict[str, Any]:
        """Return the values of the digest for the consensus that begins now, if it is due.

        Args:
            step: number of steps done.

        Returns:
            Values by name, empty if no digest is due. On a GPU they stay there.
        """
        if step < self.due:
            return {}
        begun = time.perf_counter()
        seconds = [self._seconds_of_device()]
        sums = self._sums(step)
        parts = _digest(sums.by_device).to(torch.float64)
        numbers = torch.cat([parts, parts.square()])
        values = numbers.tolist() if numbers.device.type == "cpu" else numbers.unbind()
        if self._events is not None:
            self._events[1].record()
        self._taken.append(sums)
        seconds.append(time.perf_counter() - begun)
        a_step = (self._seconds_of_steps() - self._begun) / max(1, step - self._first)
        self._begin_interval(step)
        self._plan(step, sys.maxsize)
        return dict(zip(_VALUES, [*values, max(seconds), a_step], strict=True))

    def judge(self, sums: Mapping[str, float]) -> None:
        """Act on the consensus, in the same way on all ranks.

        Args:
            sums: sums over the ranks; they have the values of a digest if one was due.

        Raises:
            ReplicaError: the ranks had different states when this consensus began.
        """
        if _VALUES[0] not in sums:
            return
        taken = self._taken.popleft()
        *numbers, cost, a_step = (sums[name] for name in _VALUES)
        # By Cauchy and Schwarz, as in `Consensus`, here in whole numbers of any size.
        size, half = self._context.backend.world_size, len(numbers) // 2
        pairs = zip(map(int, numbers[:half]), map(int, numbers[half:]), strict=True)
        if any(total * total != squares * size for total, squares in pairs):
            self._refuse_unlike(taken)
        self._agreed = taken.step
        if self._every is None:
            self._plan(taken.step, math.ceil(cost / (_SHARE * a_step)) if a_step > 0 else _WARM_UP)

    def _plan(self, step: int, distance: int) -> None:
        """Set the step of the next digest: by the option, or at a distance if it is not given."""
        if self._every is None:
            self.due = step + max(1, distance)
        elif self._every:
            self.due = self.forced = step - step % self._every + self._every

    def _begin_interval(self, step: int) -> None:
        self._begun, self._first = self._seconds_of_steps(), step

    def _seconds_of_steps(self) -> float:
        return float(sum(STEP(self._seconds)))

    def _seconds_of_device(self) -> float:
        """Return the seconds that the last digest took on a GPU, and begin to measure this one."""
        if self._context.device.type != "cuda":
            return 0.0
        last, begin = self._events, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._events = begin, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        if last is None or not last[1].query():  # type: ignore[no-untyped-call]
            return 0.0
        return float(last[0].elapsed_time(last[1])) / 1000

    @torch.no_grad()
    def _sums(self, step: int) -> _Sums:
        """Return the sum of the bits of each tensor.

        Sums are whole numbers of 32 bits, which wrap around. So they need no copy of a tensor in a
        wider type, and a flipped bit always changes the sum.
        """
        devices: dict[torch.device, dict[tuple[int, ...], list[tuple[int, Tensor]]]] = {}
        for number, (_, tensor) in enumerate(_tensors(self._context)):
            bits, size = _bits(tensor), tensor.numel()
            # A large tensor has a group of its own.
            kind = (bits.element_size(), bits.numel(), number if size > _SMALL else -1)
            devices.setdefault(tensor.device, {}).setdefault(kind, []).append((number, bits))
        order: list[int] = []
        by_device = []
        for groups in devices.values():
            sums = []
            for group in groups.values():
                numbers, tensors = zip(*group, strict=True)
                order += numbers
                if len(group) == 1:
                    sums.append(tensors[0].sum(dtype=torch.int32).reshape(1))
                else:
                    rows = torch.stack([bits.reshape(-1) for bits in tensors])
                    sums.append(rows.sum(1, dtype=torch.int32))
            by_device.append(torch.cat(sums))
        return _Sums(step, order, by_device)

    def _refuse_unlike(self, sums: _Sums) -> None:
        """Exchange the sums of all tensors; raise the error of `compare` if they differ."""
        context = self._context
        own = [number for tensor in sums.by_device for number in tensor.tolist()]
        seen = context.backend.gather_object((own, _settings(context)))
        found = on_rank_zero(context.backend, lambda: self._find_unlike(sums, seen))
        if found is None:
            return
        unlike, error = found
        error.at_fault = context.world.rank in unlike
        raise error.of_all(context.world.rank)

    def _find_unlike(
        self, sums: _Sums, every: Sequence[tuple[Sequence[int], Mapping[str, str]]]
    ) -> tuple[Sequence[int], ReplicaError] | None:
        """Return the ranks that differ from most others, and the error; None if none differs.

        Args:
            sums: sums of rank 0.
            every: sums, and settings of optimizers, of each rank.

        Returns:
            No ranks if there are as many of another kind: then it is not known who is wrong.

        Raises:
            UsageError: the ranks differ, and were never equal, or have other settings.
        """
        _refuse_other_settings([settings for _, settings in every])
        seen = [numbers for numbers, _ in every]
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, one in enumerate(seen):
            alike.setdefault(tuple(one), []).append(rank)
        if len(alike) == 1:
            return None
        if self._agreed is None:
            raise self._wrong_use(sums, seen)
        (some, most), (others, _), *_ = sorted(alike.items(), key=lambda one: -len(one[1]))
        first = self._first_unlike(sums, some, others)
        tied = sum(len(those) == len(most) for those in alike.values()) > 1
        key = "HT623.ranks-differ" if tied else "HT623.ranks-differ-from-most"
        unlike = [] if tied else [rank for rank in range(len(seen)) if rank not in most]
        ranks = ranks_text(unlike or range(len(seen)), self._context.roster.host_names)
        return unlike, ReplicaError(
            key, step=sums.step, ranks=ranks, first_difference=first, agreed=self._agreed
        )

    def _wrong_use(self, sums: _Sums, seen: Sequence[Sequence[int]]) -> UsageError:
        unlike = [rank for rank, one in enumerate(seen) if one != seen[0]]
        ranks, first = ranks_text(unlike), self._first_unlike(sums, seen[0], seen[unlike[0]])
        return UsageError(
            "HT612.weights-differ", step=sums.step, ranks=ranks, first_difference=first
        )

    def _first_unlike(self, sums: _Sums, some: Sequence[int], others: Sequence[int]) -> str:
        """Describe the first tensor in which two ranks differ."""
        if len(some) != len(others):
            return f"{len(others)} tensors instead of {len(some)}"
        pairs = zip(sums.order, some, others, strict=True)
        first = min(number for number, a, b in pairs if a != b)
        names = [name for name, _ in _tensors(self._context)]
        return f"first in {names[first]}" if first < len(names) else "in a tensor that was removed"


def _tensors(context: Context) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and states that have to be the same on all ranks, with names for messages."""
    names: dict[int, str] = {}
    for number, model in enumerate(context.models):
        model_name = f"model {number}, " if len(context.models) > 1 else ""
        for name, parameter in model.named_parameters():
            weights = context.precision.master(parameter)
            names[id(weights)] = f"{model_name}{name}"
            yield f"{model_name}{name}", weights.detach()
    for optimizer in context.optimizers:
        for key, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    where = names.get(id(key), "a parameter")
                    yield f"{name} of {type(optimizer).__name__} for {where}", value.detach()


def _settings(context: Context) -> dict[str, str]:
    """Return the plain settings of all optimizers, such as learning rates, as texts by name."""
    texts = {}
    for number, optimizer in enumerate(context.optimizers):
        of = type(optimizer).__name__ + (f" (optimizer {number})" if number else "")
        for place, group in enumerate(optimizer.param_groups):
            where = f"group {place} of the {of}" if len(optimizer.param_groups) > 1 else f"the {of}"
            for name, value in group.items():
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if isinstance(plain, (bool, int, float, str, tuple)):
                    texts[f"{name} of {where}"] = repr(plain)
    return texts


def _refuse_other_settings(seen: Sequence[Mapping[str, str]]) -> None:
    """Refuse settings of optimizers that are not those of rank 0.

    Raises:
        UsageError: a rank has another learning rate, or another setting.
    """
    for rank, settings in enumerate(seen):
        for name, value in settings.items():
            if value != seen[0].get(name, value):
                raise UsageError(
                    "HT612.settings-differ", name=name, first=seen[0][name], rank=rank, other=value
                )


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as whole numbers of at most 32 bits, without a copy of a dense one."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    if tensor.element_size() > 4:
        # In numbers of 64 bits, two flips of the highest bit would cancel whatever their weights.
        return tensor.reshape(-1).view(torch.int32)
    return tensor.view(_BITS[tensor.element_size()])


@torch.no_grad()
def _digest(by_device: Sequence[Tensor]) -> Tensor:
    """Return a digest of 64 bits as four whole numbers, on a GPU if a sum is there.

    It is the sum of all numbers, each times a weight, modulo 2**64. The weights are odd, so that no
    change of a number is lost. They are cubes of different numbers, so that equal changes of two
    numbers do not cancel.
    """
    total: Tensor | int = 0
    begin = 1
    for sums in sorted(by_device, key=lambda one: one.device.type != "cpu"):
        end = begin + 2 * len(sums)
        odd = torch.arange(begin, end, 2, dtype=torch.int64, device=sums.device)
        part, begin = (sums * odd * odd * odd).sum(), end
        total = part + int(total)  # what is on the CPU reaches a GPU as a number, without a wait
    assert isinstance(total, Tensor)
    return total.reshape(1).view(torch.int16)
