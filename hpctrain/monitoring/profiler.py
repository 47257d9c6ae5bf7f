"""Trace of a few steps that shows each kernel."""

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["Profile", "steps"]


def steps(text: str) -> range:
    """Return the steps that `--profile A:B` selects.

    Raises:
        UsageError: the text has another format, or A is not less than B.
    """
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError("HT653.not-a-range", text=text)
    return range(int(match[1]), int(match[2]))


class Profile:
    """Trace of some steps of a rank with torch.profiler; its errors do not end the run.

    Args:
        steps: steps to trace, each as the number of steps done before it.
        device: device used by the rank.
        path: path of the trace file.
    """

    def __init__(self, steps: range, device: torch.device, path: Path) -> None:
        self._steps, self._path = steps, path
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profiler: profile | None = None
        self._first = 0

    def at(self, step: int) -> None:
        """Begin or end the trace if needed; called between two steps.

        Args:
            step: steps done.
        """
        if self._profiler is None and step in self._steps:
            self._begin(step)
        elif self._profiler is not None and step not in self._steps:
            self.close(step)

    def _begin(self, step: int) -> None:
        self._first = step
        profiler = profile(activities=self._activities)
        try:
            profiler.start()
        except Exception as error:  # another profiler runs, or the driver forbids it
            self._disable(error)
        else:
            self._profiler = profiler

    def close(self, step: int) -> None:
        """Write the trace if one was begun; otherwise warn that the run ended too early.

        Args:
            step: steps done.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            if self._steps:
                logger.warning(
                    "no trace: --profile %d:%d, but the run ended at step %d",
                    self._steps.start,
                    self._steps.stop,
                    step,
                )
            return
        self._steps = range(0)
        try:
            profiler.stop()
            self._path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
        except Exception as error:  # a full disk; kineto raises many types of errors
            self._disable(error)
            return
        logger.info(
            "steps %d to %d are traced in %s: open it at https://ui.perfetto.dev",
            self._first + 1,
            step,
            self._path,
        )

    def _disable(self, error: Exception) -> None:
        self._steps = range(0)
        logger.warning("no trace in %s: %s", self._path, error)
