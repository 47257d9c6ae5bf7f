"""Errors with a message in three parts: what was found, what was expected, and what to type.

The texts are in `codes.toml`; `HpctrainError("HT614.no-end", …)` fills one in.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO

from hpctrain.errors import exit_codes

__all__ = [
    "CheckpointError",
    "ContradictionError",
    "DataError",
    "GivenUpError",
    "HpctrainError",
    "NonFiniteError",
    "RankLostError",
    "RankMissingError",
    "ReplacedError",
    "ReplicaError",
    "StartError",
    "UsageError",
    "repeated",
    "report_no_uncaught",
    "report_uncaught",
    "write_error",
]


_EXPECTED, _FIX, _OR, _MORE = "  expected: ", "  fix:      ", "  or:       ", "  more:     "
_EXPLAIN = "hpctrain explain "


class HpctrainError(Exception):
    """An error that the user can fix, with a message of `codes.toml`.

    Pickling and a DataLoader worker keep the text.

    Args:
        key: key of the message, such as `HT614.no-end`; any other text becomes the message itself.
        values: values of the message's placeholders. A list in a fix stands for several fixes.

    Attributes:
        code: code of the error, such as `HT614`; empty for a text of the script.
        found: what was found, with the name of the variable, option or file it came from.
        expected: what was expected; may be empty where `found` is enough.
        fixes: what to type; any one of them is enough. Empty where no command helps.
    """

    exit_code = exit_codes.FAILED

    #: Whether rank 0 prints the full message, so that this rank prints only its first line.
    reported_by_rank_0 = False

    def __init__(self, key: str, /, **values: object) -> None:
        from hpctrain.errors import codes  # only for an error

        if key.startswith("Caught ") and not values:
            self._set(*self._in_worker(key))
        elif codes.is_key(key):
            message = codes.message(key, **values)
            self._set(message.code, message.found, message.expected, *message.fixes)
        else:
            self._set("", key)

    @classmethod
    def of_text(cls, code: str, found: str, expected: str = "", *fixes: str) -> Self:
        """Return an error with the text of another one, from another process or with a prefix.

        Args:
            code: code of the error, such as "HT501", or "".
            found: what is wrong.
            expected: what would be right, or "".
            fixes: commands or settings, each of which removes the cause.
        """
        error = cls.__new__(cls)
        error._set(code, found, expected, *fixes)
        return error

    def _set(self, code: str, found: str, expected: str = "", *fixes: str) -> None:
        self.args = (code, found, expected, *fixes)
        self.code, self.found, self.expected, self.fixes = code, found, expected, fixes

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_text, (type(self), *self.args), vars(self)

    def __str__(self) -> str:
        lines = [self.found]
        if self.expected:
            lines.append(f"{_EXPECTED}{self.expected}")
        lines += [f"{_OR if number else _FIX}{fix}" for number, fix in enumerate(self.fixes)]
        return "\n".join([*lines, *([f"{_MORE}{_EXPLAIN}{self.code}"] if self.code else [])])

    def of_all(self, rank: int) -> Self:
        """Return the error for all ranks to raise, of which rank 0 alone prints all lines.

        Args:
            rank: this rank.
        """
        self.reported_by_rank_0 = rank > 0
        return self

    def _in_worker(self, text: str) -> list[str]:
        """Return code, found, expected and fixes of an error that a DataLoader worker raised.

        torch raises a new error of the same class in the main process, with the text of the
        traceback as its only argument. Source: ExceptionWrapper.reraise of torch._utils.
        """
        kind = type(self)
        message = text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].rstrip("\n")
        body, mark, code = message.rpartition(f"\n{_MORE}{_EXPLAIN}")
        if not mark:
            return ["", message]
        body, _, fixes = body.partition(f"\n{_FIX}")
        found, _, expected = body.partition(f"\n{_EXPECTED}")
        return [code, found, expected, *filter(None, fixes.split(f"\n{_OR}"))]


def _of_text(kind: type[HpctrainError], *args: str) -> HpctrainError:
    return kind.of_text(*args)


def repeated(kind: str, code: str, found: str, expected: str = "", *fixes: str) -> HpctrainError:
    """Return rank 0's error for another rank to raise, which prints only its first line.

    Args:
        kind: class name of the error.
        code: code of the error.
        found: what is wrong.
        expected: what would be right.
        fixes: the fixes of the error.
    """
    kinds = {subclass.__name__: subclass for subclass in _kinds(HpctrainError)}
    error = kinds.get(kind, HpctrainError).of_text(code, found, expected, *fixes)
    error.reported_by_rank_0 = True
    return error


def _kinds(kind: type[HpctrainError]) -> Iterator[type[HpctrainError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


class UsageError(HpctrainError):
    """An option, a path or a combination of them that cannot work."""

    exit_code = 2


class ContradictionError(UsageError):
    """Environment variables that are incomplete, invalid or contradict each other."""


class StartError(HpctrainError):
    """A start that failed: of the ranks, of one of their devices, or of a job."""


class RankMissingError(StartError):
    """A start that failed because another rank did not come or cannot be reached."""


class RankLostError(HpctrainError):
    """The loss or failure of another rank that this rank needed."""


class NonFiniteError(HpctrainError):
    """A loss, a gradient or a weight that is not finite, so that training cannot continue."""


class ReplicaError(HpctrainError):
    """Weights or optimizer states that have become different on some ranks."""

    #: Whether this rank is known to be one of those that differ from the others.
    at_fault = False


class DataError(HpctrainError):
    """A sample of a data set that cannot be read."""


class GivenUpError(HpctrainError):
    """A job that was restarted too often without progress."""

    exit_code = exit_codes.GIVEN_UP


class CheckpointError(HpctrainError):
    """A checkpoint that cannot be written or read."""


class ReplacedError(CheckpointError):
    """Another start took over the run directory, so this start must not commit checkpoints."""


def write_error(error: HpctrainError, stream: TextIO | None = None) -> None:
    """Write an error; only its first line where rank 0 writes all of it.

    Args:
        error: error to write.
        stream: file to write to (default: standard error of this process).
    """
    # The hook of torch.distributed runs before that of `report_uncaught` and buffers sys.stderr
    # until the latter returns, which it never does. So the message goes to the original stream.
    stream = stream or sys.__stderr__ or sys.stderr
    stream.write(f"hpctrain: error: {error.found if error.reported_by_rank_0 else error}\n")
    stream.flush()


def report_uncaught(
    report: Callable[[HpctrainError], object] = write_error,
    shows: Callable[[str], bool] = lambda _: True,
) -> None:
    """Install a hook that ends the process without a traceback after an uncaught `HpctrainError`.

    The hook writes the message to standard error and exits with the error's exit code. It passes
    other exceptions to the previous hook. A second call changes nothing. (IPython does not use
    `sys.excepthook`, so a notebook shows the exception like any other.)

    Args:
        report: function that writes the error.
        shows: returns whether this process shows another exception, for the text that describes it
            in one line, and whether with its traceback, for the empty text.
    """
    if hasattr(sys.excepthook, "instead_of"):
        return
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, HpctrainError):
            text = f"{kind.__name__}: {error}"
            # The text first: of ranks with the same error, one alone can show it in either way.
            if shows(text):
                if shows(""):
                    previous(kind, error, traceback)
                else:
                    (sys.__stderr__ or sys.stderr).write(f"{text}\n")
            return
        sys.stdout.flush()
        report(error)
        # Python always uses exit code 1 for an uncaught exception. So the process exits here,
        # after running its exit handlers.
        atexit._run_exitfuncs()
        os._exit(error.exit_code)

    hook.instead_of = previous  # type: ignore[attr-defined]
    sys.excepthook = hook


def report_no_uncaught() -> None:
    """Remove the hook of `report_uncaught`, if there is one."""
    sys.excepthook = getattr(sys.excepthook, "instead_of", sys.excepthook)
