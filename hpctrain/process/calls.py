"""Calls of a function that one process packs, and another one makes."""

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from hpctrain.errors import UsageError

__all__ = ["make", "pack", "pickled"]


def pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], key: str
) -> bytes:
    """Pickle a function and its arguments, which may come from a notebook, for the ranks.

    Args:
        function, args, kwargs: the call.
        key: key of the error's message.

    Raises:
        UsageError: the function or an argument cannot be pickled.
    """
    name = getattr(function, "__qualname__", function)
    return pickled((function, tuple(args), dict(kwargs)), key, function=name)


def pickled(value: Any, key: str, **values: object) -> bytes:
    """Return a value as bytes.

    Args:
        value: value to pickle.
        key: key of the error's message, with the placeholder `reason` and those of `values`.
        values: values of other placeholders.

    Raises:
        UsageError: the value cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """A pickler that also sends modules of own classes by their names, as torch.classes."""

        def reducer_override(self, one: Any) -> Any:
            if isinstance(one, ModuleType) and type(one) is not ModuleType:
                return importlib.import_module, (one.__name__,)
            return super().reducer_override(one)

    try:
        Pickler(data := io.BytesIO()).dump(value)
        return data.getvalue()
    except Exception as error:  # __reduce__ and __getstate__ of any object may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(key, **values, reason=reason) from None


def make(call: bytes) -> Any:
    """Make a call of `pack`, which comes from a process of the same user; return its result."""
    function, args, kwargs = pickle.loads(call)  # noqa: S301
    if getattr(function, "__module__", None) == "__main__":
        # pickle looks up the classes of a notebook or script in `__main__`.
        names = vars(sys.modules["__main__"])
        names.update({**getattr(function, "__globals__", {}), **names})
    return function(*args, **kwargs)
