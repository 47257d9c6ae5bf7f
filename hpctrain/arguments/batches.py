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
        raise UsageError("HT504.no-global-batch")
    if total is None:
        size, times = size or DEFAULT_BATCH_SIZE, times or 1
        return Batches(size * times * world_size, size, times)
    unit = world_size * (size or 1) * (times or 1)
    if size and times and unit != total:
        raise UsageError("HT505.contradiction", options=opts, world_size=world_size, product=unit)
    parts, rest = divmod(total, unit)
    if rest:
        named = {"--batch-size": size, "--accumulate": times}
        factors = "".join(f" × {name} {value}" for name, value in named.items() if value)
        factors = f"{world_size} ranks{factors}"
        fixes = [f"--global-batch {number * unit}" for number in (parts, parts + 1) if number]
        most, rest = divmod(total, world_size * (times or 1))
        if size and not rest:
            fits = max(number for number in range(1, size + 1) if most % number == 0)
            fixes.insert(0, f"--batch-size {fits}")
        raise UsageError(
            "HT505.not-a-multiple", options=opts, factors=factors, unit=unit, fixes=fixes
        )
    return Batches(total, size or parts, times or (parts if size else 1))
