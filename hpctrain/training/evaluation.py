"""Exact evaluation results over shards of different sizes."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.process.events import Events
from hpctrain.process.phases import IDLE

__all__ = ["Classification", "Scores", "total"]

# Top-5, which is published beside top-1 (ILSVRC).
_NEAR = 5


def total(backend: Backend, *values: Any) -> tuple[float, ...]:
    """Sum each value over all ranks.

    Whole numbers are summed as int64 and stay whole, others are summed as float64. The ranks may
    have different numbers of samples; each rank calls this once, with the same number of values.

    Args:
        backend: backend of the session.
        values: numbers of Python or NumPy, or tensors of one element on any device.

    Returns:
        Python numbers, the same on all ranks, in the order of the values.
    """
    whole = torch.zeros(2, len(values), dtype=torch.int64)  # sums, and how many are not whole
    parts = torch.zeros(len(values), dtype=torch.float64)
    for place, value in enumerate(values):
        try:
            number: Any = value.item() if isinstance(value, Tensor) else value
            try:
                whole[0, place] = operator.index(number)
            except TypeError:
                whole[1, place], parts[place] = 1, float(number)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError("HT602.sum-of-no-number", kind=type(value).__name__) from None
    # Always two sums of the same lengths: a rank without samples has 0 where another has 0.5.
    sums, fractional = backend.sum(whole.to(backend.device_of_sums)).tolist()
    rest = backend.sum(parts.to(backend.device_of_sums)).tolist()
    return tuple(n + r if f else n for n, f, r in zip(sums, fractional, rest, strict=True))


@dataclass(frozen=True, eq=False)
class Scores:
    """Results of a classifier on a data set, the same on all ranks; tensors are on the CPU.

    Attributes:
        top1: fraction of the samples whose own class has the highest output, 0 to 1.
        top5: fraction of the samples whose own class is among the five highest outputs; among all
            outputs if there are fewer than five classes.
        loss: mean cross entropy per sample, in nats; NaN if the loss of a sample is NaN.
        count: number of scored samples.
        ignored: number of samples with a target below 0; no other attribute includes them.
        per_class: float64 (C,), top-1 accuracy for each class; NaN for a class without samples.
        confusion: int64 (C, C), number of samples by their class (row) and the class of the highest
            output (column). A sample whose loss is NaN is in no column.
    """

    top1: float
    top5: float
    loss: float
    count: int
    ignored: int
    per_class: Tensor
    confusion: Tensor

    def metrics(self) -> dict[str, float]:
        """Return the values for `run.log`, by the names used in evaluation rows."""
        return {"top1": self.top1, "top5": self.top5, "eval_loss": self.loss}


class Classification:
    """Counter of a classifier's correct results; no batch makes the host wait for the device.

    Of equal outputs, that of the lower class ranks higher, on every device, for top-1 and top-5. A
    sample whose loss is NaN, because an output is NaN or +∞, is never correct. All counts are whole
    numbers, so they do not depend on the batches or on the number of ranks. The loss of a sample is
    computed in float32 or float64, and summed in float64.

    Device memory: 9 · C² bytes, and 16 · C² more in `compute`. For 1000 classes these are 9 and
    16 MB, of which 8 MB are summed over the ranks once per evaluation.

    Args:
        backend: backend of the session.
        classes: number of classes, C.
        events: told of the exchange between the ranks.

    Raises:
        UsageError: fewer than two classes.
    """

    def __init__(self, backend: Backend, classes: int, events: Events | None = None) -> None:
        if classes < 2:
            raise UsageError("HT603.too-few-classes", classes=classes)
        self._backend = backend
        self._classes = classes
        self._events = events or Events()
        device, self._device = backend.device_of_sums, backend.device
        # Tensors created in inference_mode could not be changed outside of it.
        with torch.inference_mode(False):
            # By row of the table below: the class, or -1 for a row without a class.
            self._class = torch.arange(-1, classes + 1, device=device)
            self._class[-1] = -1
            numbers = torch.arange(classes, device=device)
            self._lower = numbers < self._class[:, None]  # classes with a lower number
            self._one = torch.ones(1, dtype=torch.int64, device=device)
            # Indexed by target and guess. First row: ignored targets. Last row: targets that are no
            # class. Last column: samples whose loss is NaN.
            cells = (classes + 2) * (classes + 1)
            self._guesses = torch.zeros(cells, dtype=torch.int64, device=device)
            self._near = torch.zeros((), dtype=torch.int64, device=device)
            self._loss = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch of this rank.

        Args:
            outputs: logits of any floating-point type, of shape (N, C), on the device.
            targets: classes as whole numbers from 0, of shape (N,), on the device. Targets below 0
                are ignored. For a target of C or more, `compute` raises an error.

        Raises:
            UsageError: shapes, types or devices do not fit.
        """
        self._check(outputs, targets)
        outputs, targets = outputs.to(self._loss.device), targets.to(self._loss.device)
        # The conversion is exact, so the order of the outputs stays the same.
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        rows = (targets.long() + 1).clamp(0, self._classes + 1)
        classes = self._class.index_select(0, rows)
        losses = cross_entropy(outputs, classes, reduction="none", ignore_index=-1)
        self._loss += losses.sum(dtype=torch.float64)
        undecided = losses.isnan()
        guesses = outputs.argmax(dim=1).masked_fill(undecided, self._classes)  # first one if equal
        places = guesses.add(rows, alpha=self._classes + 1)
        self._guesses.index_add_(0, places, self._one.expand_as(rows))
        # torch.topk does not define which of equal outputs it returns.
        own = outputs.gather(1, classes.clamp(min=0)[:, None])
        ahead = (outputs > own) | ((outputs == own) & self._lower.index_select(0, rows))
        self._near += ((ahead.sum(dim=1) < _NEAR) & ~undecided & (classes >= 0)).sum()

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check the properties of a batch that do not depend on its numbers."""
        device, batch = self._device, ""
        if outputs.dim() != 2 or outputs.shape[1] != self._classes:
            batch = f"outputs of shape {tuple(outputs.shape)}"
        elif targets.shape != outputs.shape[:1]:
            batch = f"targets of shape {tuple(targets.shape)} for {len(outputs)} outputs"
        elif not outputs.is_floating_point():
            batch = f"outputs of type {outputs.dtype}"
        elif targets.is_floating_point():
            batch = f"targets of type {targets.dtype}"
        elif not outputs.device == targets.device == device:
            batch = f"outputs on {outputs.device} and targets on {targets.device}"
        if batch:
            raise UsageError(
                "HT603.batch-unusable", classes=self._classes, batch=batch, device=device
            )

    def compute(self) -> Scores:
        """Compute the scores over all batches of all ranks so far; called by all ranks.

        This takes one exchange. A rank without a batch takes part.

        Raises:
            UsageError: a target is no class, or there is no sample to score; the same on all ranks.
        """
        self._events.exchange(f"scores of {self._classes} classes")
        # One exchange for everything, as float64, which is exact below 2⁵³.
        last = torch.stack([self._near.double(), self._loss])
        sums = self._backend.sum(torch.cat([self._guesses.double(), last])).cpu()
        self._events.heartbeat.enter(IDLE)
        table = sums[:-2].reshape(self._classes + 2, self._classes + 1)
        ignored, outside = int(table[0].sum()), int(table[-1].sum())
        guesses, (near, loss) = table[1:-1], sums[-2:].tolist()
        samples, right = guesses.sum(dim=1), guesses.diagonal()
        count = int(samples.sum())
        if outside or not count:
            raise self._refusal(outside, ignored).of_all(self._backend.rank)
        return Scores(
            int(right.sum()) / count,
            near / count,
            loss / count,
            count,
            ignored,
            right / samples,
            guesses[:, :-1].long(),
        )

    def _refusal(self, outside: int, ignored: int) -> UsageError:
        """Return the error that explains why there are no scores."""
        if outside:
            return UsageError("HT603.targets-too-large", classes=self._classes, outside=outside)
        return UsageError("HT603.no-samples", classes=self._classes, ignored=ignored)
