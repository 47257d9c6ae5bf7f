"""Tracker for TensorBoard: event files in the run directory."""

from collections.abc import Mapping

from hpctrain.monitoring.trackers.base import About, Tracker

__all__ = ["TensorBoard"]

_SECONDS_TO_DISK = 10


class TensorBoard(Tracker):
    """Event files in RUN_DIR/tensorboard; `tensorboard --logdir runs` shows all runs of a folder.

    Args:
        about: description of the run.
    """

    package = "tensorboard"

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._kind, self._about = SummaryWriter, about

    def open(self) -> None:
        """Begin a file; TensorBoard hides later steps of earlier files."""
        folder = self._about.directory.path / "tensorboard"
        later = self._about.step + 1 if folder.exists() else None
        self._writer = self._kind(str(folder), purge_step=later, flush_secs=_SECONDS_TO_DISK)
        lines = [f"| {name} | {value} |" for name, value in self._about.options.items()]
        text = "\n".join(["| option | value |", "|---|---|", *lines])
        self._writer.add_text("options", text, self._about.step)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Record a row of metrics, each value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)

    def close(self, status: str) -> None:
        """Write the remaining data and close the file."""
        del status
        self._writer.close()
