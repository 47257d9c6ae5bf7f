"""Errors with a message in three parts: what was found, what was expected, and what to type."""

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

__all__ = [
    "CheckpointError",
    "ContradictionError",
    "DataError",
    "GivenUpError",
    "HpctrainError",
    "NonFiniteError",
    "RankLostError",
    "ReplacedError",
    "StartError",
    "UsageError",
    "repeated",
    "report_uncaught",
]


_EXPECTED, _FIX = "  expected: ", "  fix:      "


class HpctrainError(Exception):
    """An error that the user can fix.

    Args:
        found: what was found, with the name of the variable, option or file it came from.
        expected: what was expected; may be empty where `found` is enough.
        fix: what to type; may be empty where no command helps.
    """

    exit_code = 1

    #: Whether rank 0 prints the full message, so that this rank prints only its first line.
    told_by_rank_0 = False

    def __init__(self, found: str, expected: str = "", fix: str = "") -> None:
        if found.startswith("Caught ") and not expected:
            found, expected, fix = self._in_worker(found)
        super().__init__(found, expected, fix)
        self.found = found
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.found]
        if self.expected:
            lines.append(f"{_EXPECTED}{self.expected}")
        if self.fix:
            lines.append(f"{_FIX}{self.fix}")
        return "\n".join(lines)

    def _in_worker(self, text: str) -> tuple[str, str, str]:
        """Return found, expected and fix of an error that a DataLoader worker raised.

        torch raises a new error of the same class in the main process, with the text of the
        traceback as its only argument. Source: ExceptionWrapper.reraise of torch._utils.
        """
        kind = type(self)
        said = text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].rstrip("\n")
        said, _, fix = said.partition(f"\n{_FIX}")
        found, _, expected = said.partition(f"\n{_EXPECTED}")
        return found, expected, fix


def repeated(kind: str, found: str, expected: str, fix: str) -> HpctrainError:
    """Return rank 0's error for another rank to raise, which prints only its first line.

    Args:
        kind: class name of the error.
        found, expected, fix: arguments of the error.
    """
    kinds = {one.__name__: one for one in _kinds(HpctrainError)}
    error = kinds.get(kind, HpctrainError)(found, expected, fix)
    error.told_by_rank_0 = True
    return error


def _kinds(kind: type[HpctrainError]) -> Iterator[type[HpctrainError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


class UsageError(HpctrainError):
    """An option, a path or a combination of them that cannot work."""

    exit_code = 2


class ContradictionError(UsageError):
    """Environment variables that are incomplete, invalid or contradict each other."""


class StartError(HpctrainError):
    """A start that failed: of the ranks, of one of their devices, or of a job."""


class RankLostError(HpctrainError):
    """The loss or failure of another rank that this rank needed."""


class NonFiniteError(HpctrainError):
    """A loss, a gradient or a weight that is not finite, so that training cannot continue."""


class DataError(HpctrainError):
    """A sample of a data set that cannot be read."""


class GivenUpError(HpctrainError):
    """A job that was restarted too often without progress."""

    exit_code = 76


class CheckpointError(HpctrainError):
    """A checkpoint that cannot be written or read."""


class ReplacedError(CheckpointError):
    """Another start took over the run directory, so this start must not commit checkpoints."""


def report_uncaught(shows: Callable[[], bool] = lambda: True) -> None:
    """Install a hook that ends the process without a traceback after an uncaught `HpctrainError`.

    The hook writes the message to standard error and exits with the error's exit code. It passes
    other exceptions to the previous hook. A second call changes nothing. (IPython does not use
    `sys.excepthook`, so a notebook shows the exception like any other.)

    Args:
        shows: returns whether this process shows the traceback of other exceptions; if not, the
            hook prints one line.
    """
    if getattr(sys.excepthook, "reports_hpctrain_errors", False):
        return
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, HpctrainError):
            if shows():
                previous(kind, error, traceback)
            else:
                (sys.__stderr__ or sys.stderr).write(f"{kind.__name__}: {error}\n")
            return
        sys.stdout.flush()
        # The hook of torch.distributed runs before this one and buffers sys.stderr until this
        # hook returns, which it never does. So the message goes to the original stream.
        stream = sys.__stderr__ or sys.stderr
        stream.write(f"hpctrain: error: {error.found if error.told_by_rank_0 else error}\n")
        stream.flush()
        # Python always uses exit code 1 for an uncaught exception. So the process exits here,
        # after running its exit handlers.
        atexit._run_exitfuncs()
        os._exit(error.exit_code)

    hook.reports_hpctrain_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
