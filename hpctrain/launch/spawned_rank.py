"""A rank of `hpctrain.spawn`: it calls the function and leaves what that returns."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from hpctrain.cluster.launchers import detect
from hpctrain.errors import UsageError, report_uncaught
from hpctrain.launch.ranks import die_with_parent

__all__ = ["main"]


def main(name: str) -> None:
    """Call the function of a folder that `spawning` has filled, and write its result there.

    Raises:
        UsageError: the result cannot be pickled.
        Exception: whatever the function raises.
    """
    die_with_parent()
    report_uncaught()
    folder = Path(name)
    place = json.loads((folder / "place.json").read_text())
    sys.path[:], sys.argv[:] = place["path"], place["argv"]
    rank = detect().rank
    # Nobody else can write there.
    function, args, kwargs = pickle.loads((folder / "call.pickle").read_bytes())  # noqa: S301
    _settle(function)
    result = function(*args, **kwargs)
    path = folder / f"result-{rank}"
    path.with_suffix(".new").write_bytes(_pickled(result, rank))
    os.replace(path.with_suffix(".new"), path)


def _settle(function: Any) -> None:
    """Let what came from a script or notebook be found in `__main__`, where pickle seeks it."""
    if getattr(function, "__module__", None) == "__main__":
        names = vars(sys.modules["__main__"])
        for key, value in getattr(function, "__globals__", {}).items():
            names.setdefault(key, value)


def _pickled(result: Any, rank: int) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # what __reduce__ and __getstate__ of anything may raise
        raise UsageError(
            f"what the function returned on rank {rank}, a {type(result).__name__}, cannot be sent "
            f"back: {type(error).__name__}: {error}",
            "something that pickle takes: numbers, texts, lists, arrays, tensors",
            "return the numbers that you need; models and files stay in the rank",
        ) from None
