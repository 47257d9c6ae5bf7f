"""Where a new run begins: at the checkpoint of another run, or at a part of it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch.optim.lr_scheduler import LRScheduler

from hpctrain import checkpoint
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training import identity
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context

__all__ = ["Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """Checkpoint that a run loads, and what it takes from it.

    Attributes:
        directory: run directory with the checkpoint.
        steps: steps of the checkpoints to try, in ascending order; None for all there are.
        what: `all`, `all-but-optimizer` or `model`.
        keeps_step: whether the run continues at the step of the checkpoint, not at step 0.
    """

    directory: RunDirectory
    steps: tuple[int, ...] | None = None
    what: str = "all"
    keeps_step: bool = True

    @classmethod
    def of_options(cls, context: Context, own: RunDirectory) -> Self | None:
        """Return the checkpoint that `--resume-from` names, or None; called by all ranks.

        Args:
            context: context of the training.
            own: directory of the run.

        Raises:
            UsageError: there is no checkpoint, or it is of this run, or of another model.
        """
        options = context.options
        if options.resume_from is None:
            if options.restore != "all":
                raise UsageError("HT621.restore-alone", options=options)
            return None
        what, _, step = options.restore.partition(",")
        folder, steps = Path(options.resume_from), None
        if named := re.fullmatch(r"step-(\d+)", folder.name):
            folder, steps = folder.parent.parent, (int(named[1]),)
        directory = RunDirectory(folder)

        def check() -> None:
            found = checkpoint.places(directory)
            if not found or not set(steps or found) <= set(found):
                raise UsageError("HT621.nothing-to-resume-from", options=options)
            if os.path.realpath(directory.path) == os.path.realpath(own.path):
                raise UsageError("HT621.resume-from-itself", options=options)
            if identity.of_run(directory)["model"] != identity.signature(context.models):
                raise UsageError("HT621.other-model", options=options)

        on_rank_zero(context.backend, check)
        return cls(directory, steps, what, keeps_step=not step)

    def objects(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects of the user that get their states from the checkpoint."""
        if self.what == "model":
            return {}
        kept = self.what == "all"
        return {n: one for n, one in others.items() if kept or not isinstance(one, LRScheduler)}

    def report(self, step: int) -> None:
        """Print in one line what the run has from the checkpoint."""
        parts = {
            "all": "everything",
            "all-but-optimizer": "everything but optimizers and schedulers",
            "model": "weights and buffers of the models",
        }
        logger.info(
            "%s of step %d in %s; the run starts at step %d",
            parts[self.what],
            step,
            self.directory.path,
            step if self.keeps_step else 0,
        )
