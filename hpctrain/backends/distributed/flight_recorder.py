"""torch's Flight Recorder: it keeps the latest collectives of NCCL, and writes them when asked.

Source: "PYTORCH ProcessGroupNCCL Environment Variables" in torch's documentation. torch waits for
its own time-out before it writes, but the watchdog ends a hang sooner. So the watchdog asks for the
file, by the FIFO that torch reads about once a second.
"""

import os
import shutil
import tempfile
from pathlib import Path

from hpctrain.backends.borrowed_env import Environment
from hpctrain.cluster import system

__all__ = ["FlightRecorder"]

# A person may have set the second names, which torch still reads, with a warning.
_SIZES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FILES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_REQUEST = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


class FlightRecorder:
    """The Flight Recorder of one rank; created before the process group.

    Args:
        environment: environment variables of this process; those that a person has set stay.
        rank: number of this rank.
    """

    def __init__(self, environment: Environment, rank: int) -> None:
        self._environment, self._rank = environment, rank
        self._folder = tempfile.mkdtemp(prefix="hpctrain-nccl-")
        self._fifo: int | None = None
        self._chosen = next(filter(None, map(os.environ.get, _FILES)), None)
        if not any(map(os.environ.get, _SIZES)):
            environment.set(_SIZES[0], "2000")  # the default of newer releases of torch
        environment.default(_ON_TIMEOUT, "1")
        environment.default(_REQUEST, f"{self._folder}/rank-")

    def dump_to(self, folder: Path) -> tuple[str, str] | None:
        """Return the FIFO for requests, and the file in a folder; None if torch reads no FIFO."""
        if self._fifo is None:
            try:
                request = f"{os.environ[_REQUEST]}{self._rank}.pipe"
                self._fifo = os.open(request, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return None
            # The open FIFO is enough, and nothing is left if this process is killed.
            shutil.rmtree(self._folder, ignore_errors=True)
        prefix = self._chosen or str(folder.absolute() / "nccl-rank-")
        if not self._chosen:
            self._environment.set(_FILES[0], prefix)
        return system.path_of(self._fifo), f"{prefix}{self._rank}"

    def close(self) -> None:
        """Remove what is left of the FIFO."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._fifo is not None:
            os.close(self._fifo)
            self._fifo = None
