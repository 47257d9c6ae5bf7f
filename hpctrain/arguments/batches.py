"""Split of an optimizer step into micro-batches."""

from dataclasses import dataclass

from hpctrain.arguments.table import DEFAULT_BATCH_SIZE, Options
from hpctrain.errors import UsageError

__all__ = ["Batches", "plan_batches"]


@dataclass(frozen=True, slots=True)
class Batches:
    """Sizes of one optimizer step: `global_batch = batch_size × accumulate × world_size`."""

    global_batch: int
    batch_size: int
    accumulate: int

    def __str__(self) -> str:
        size = self.batch_size * self.accumulate
        factors = f"{self.batch_size} × {self.accumulate} × {self.global_batch // size}"
        return f"global batch {self.global_batch} = {factors}"


def plan_batches(opts: Options, world_size: int) -> Batches:
    """Compute the sizes that the options do not give.

    Raises:
        UsageError: the sizes contradict each other or leave a remainder. The message gives the
            nearest values that fit.
    """
    total, size, times = opts.global_batch, opts.batch_size, opts.accumulate
    if total is None and opts.elastic:
        raise UsageError("HT504.elastic-without-global")
    if total is None:
        size, times = size or DEFAULT_BATCH_SIZE, times or 1
        return Batches(size * times * world_size, size, times)
    unit = world_size * (size or 1) * (times or 1)
    if size and times and unit != total:
        raise UsageError(
            "HT505.global-batch-but",
            total=total,
            world_size=world_size,
            size=size,
            times=times,
            unit=unit,
        )
    parts, rest = divmod(total, unit)
    if rest:
        factor = f" × {size} (--batch-size)" if size else ""
        if times:
            factor = f" × {times} accumulated"
        raise UsageError(
            "HT505.global-batch-cannot",
            total=total,
            world_size=world_size,
            factor=factor,
            unit=unit,
            detail=f"--global-batch {parts * unit}" if parts else "",
            parts=(parts + 1) * unit,
        )
    return Batches(total, size or parts, times or (parts if size else 1))
