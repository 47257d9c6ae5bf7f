"""What fsdp needs all ranks to do alike: call the same blocks, and use the same parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import UsageError
from hpctrain.process.heartbeat import Heartbeat

__all__ = ["CallOrder"]

# A GAN has three passes in a step; some more for a second step.
_FIRST_PASSES = 6
# And no more exchanges than these, for an evaluation before the first step.
_FIRST_EXCHANGES = 1000
_BITS = 20
_SHOWN = 3


class CallOrder:
    """The calls of blocks and the gradients of this rank, which have to be those of all ranks.

    A call gathers the weights of a block from all ranks, and a backward pass sums the gradients of
    a block in one message. If another rank calls another block, or uses other parameters of it,
    gloo and NCCL put numbers of both together, or wait for ever. So in the first passes, the ranks
    compare before each call what they call, and after each pass which gradients they have. Later, a
    hash of both joins the exchanges of the run, one of them before each checkpoint.

    Args:
        all_gather_text: exchanges one text for each rank.

    Attributes:
        first_passes: passes left in which the ranks compare each call.
        heartbeat: receives the waits of these.
        number: hash of all calls and gradients so far, below 2**20: the sums of its squares over
            the ranks are exact in fp64.
    """

    def __init__(self, all_gather_text: Callable[[str], list[str]]) -> None:
        self._all_gather_text = all_gather_text
        self.first_passes, self._exchanges = _FIRST_PASSES, _FIRST_EXCHANGES
        self._blocks = 0
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self.number, self.heartbeat = 0, Heartbeat()

    def watch(self, block: nn.Module, name: str) -> None:
        """Record each call of a block from now on, before its weights are gathered."""
        self._blocks += 1
        note = torch.compiler.disable(  # type: ignore[no-untyped-call]
            partial(self._called, self._blocks, name)
        )
        block.register_forward_pre_hook(note, prepend=True)

    def watch_gradients(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Record from now on which of these parameters have a gradient after a pass."""
        for name, parameter in parameters:
            self._names.append(name)
            self._parameters.append(parameter)

    def before_backward(self) -> None:
        """Compare that all ranks begin a backward pass; called in the first passes."""
        self._compare("HT319.blocks-differ", "the backward pass of a loss")

    def after_backward(self) -> None:
        """Record which gradients there are; compare them in the first passes."""
        there = tuple([parameter.grad is not None for parameter in self._parameters])
        self._add(hash(there))
        if self.first_passes:
            names = [name for name, has in zip(self._names, there, strict=True) if not has]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            listed = ", ".join(names[:_SHOWN]) or "nothing"
            self.first_passes -= 1
            # The number tells lists apart that begin alike.
            self._compare(
                "HT319.gradients-differ", f"no gradient of {listed}{more}", str(self.number)
            )

    def _called(self, number: int, name: str, block: nn.Module, inputs: Any) -> None:
        self._add(number)
        if self.first_passes:
            self._compare("HT319.blocks-differ", name)

    def _add(self, number: int) -> None:
        self.number = (31 * self.number + number) % (1 << _BITS)

    def _compare(self, key: str, doing: str, number: str = "") -> None:
        self._exchanges -= 1
        if not self._exchanges:
            self.first_passes = 0
        # As `consensus.ask` writes it: another rank may be in a call of the session.
        with self.heartbeat.waiting():
            answers = self._all_gather_text(f"{doing}\t\t{number}")
        if len(set(answers)) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, answer in enumerate(answers):
                ranks.setdefault(answer.partition("\t")[0], []).append(rank)
            what = "; ".join(f"{ranks_text(those)}: {text}" for text, those in ranks.items())
            raise UsageError(key, what=what)
