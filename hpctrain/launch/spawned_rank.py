"""Rank of `hpctrain.spawn`: it calls the function and writes the result to a file."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from hpctrain.cluster.launchers import detect
from hpctrain.errors import UsageError, report_uncaught
from hpctrain.launch.rank_processes import end_with_parent

__all__ = ["main"]


def main(name: str) -> None:
    """Call the function that `spawning` has written to a folder, and write its result there.

    Raises:
        UsageError: the result cannot be pickled.
        Exception: any exception of the function.
    """
    end_with_parent()
    report_uncaught()
    folder = Path(name)
    place = json.loads((folder / "place.json").read_text())
    sys.path[:], sys.argv[:] = place["path"], place["argv"]
    rank = detect().rank
    # Only this user can write to the folder.
    function, args, kwargs = pickle.loads((folder / "call.pickle").read_bytes())  # noqa: S301
    _add_globals(function)
    result = function(*args, **kwargs)
    path = folder / f"result-{rank}"
    path.with_suffix(".new").write_bytes(_pickled(result, rank))
    os.replace(path.with_suffix(".new"), path)


def _add_globals(function: Any) -> None:
    """Add the globals of a script's or notebook's function to `__main__`, where pickle looks."""
    if getattr(function, "__module__", None) == "__main__":
        names = vars(sys.modules["__main__"])
        for key, value in getattr(function, "__globals__", {}).items():
            names.setdefault(key, value)


def _pickled(result: Any, rank: int) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # __reduce__ and __getstate__ of any object may raise anything
        raise UsageError(
            "HT216",
            f"what the function returned on rank {rank}, a {type(result).__name__}, cannot be sent "
            f"back: {type(error).__name__}: {error}",
            "something that pickle takes: numbers, texts, lists, arrays, tensors",
            "return the numbers that you need; models and files stay in the rank",
        ) from None
