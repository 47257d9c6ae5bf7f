"""What goes wrong, said in three lines: what was found, what was expected, what to type."""

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
    """An error that a person can mend.

    Args:
        found: what is there, with the name of the variable, option or file it came from.
        expected: what should have been there; may be empty where `found` says it all.
        fix: what to type; may be empty where nothing can be typed.
    """

    exit_code = 1

    #: Whether this rank only repeats what rank 0 says in full.
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
        """What an error said in a process of a DataLoader: torch raises another one of its kind.

        Source: ExceptionWrapper.reraise of torch._utils, which gives it the text of the traceback.
        """
        kind = type(self)
        said = text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].rstrip("\n")
        said, _, fix = said.partition(f"\n{_FIX}")
        found, _, expected = said.partition(f"\n{_EXPECTED}")
        return found, expected, fix


def repeated(kind: str, found: str, expected: str, fix: str) -> HpctrainError:
    """Rank 0's error, to be raised by another rank: of it, only the first line is shown there.

    Args:
        kind: the name of its class.
        found, expected, fix: of the error.
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
    """Wrong use: an option, a path or a combination of them that cannot work."""

    exit_code = 2


class ContradictionError(UsageError):
    """The environment that a launcher left is partial or contradicts itself."""


class StartError(HpctrainError):
    """The ranks did not come together."""


class RankLostError(HpctrainError):
    """Another rank was lost, or failed, while this one needed it."""


class NonFiniteError(HpctrainError):
    """Training has left the finite numbers."""


class DataError(HpctrainError):
    """A sample of a data set could not be read."""


class GivenUpError(HpctrainError):
    """Restarted too often without progress."""

    exit_code = 76


class CheckpointError(HpctrainError):
    """A checkpoint could not be written or read."""


class ReplacedError(CheckpointError):
    """Another start has the run directory, so this one may not commit."""


def report_uncaught(shows: Callable[[], bool] = lambda: True) -> None:
    """Let an `HpctrainError` that nobody catches end the process without a traceback.

    The message goes to standard error and the process leaves with the error's exit code. Other
    exceptions go to the hook that was there before. Calling this again changes nothing. (IPython
    does not use `sys.excepthook`: in a notebook the exception is shown as any other.)

    Args:
        shows: whether this process shows the traceback of another exception; else one line of it.
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
        # torch.distributed puts its own hook before this one and holds back what goes to
        # sys.stderr until this one returns, which it does not.
        stream = sys.__stderr__ or sys.stderr
        stream.write(f"hpctrain: error: {error.found if error.told_by_rank_0 else error}\n")
        stream.flush()
        # Python gives every uncaught exception exit code 1 and offers no way to change it, so
        # the process is left here, after what it would have run at its end.
        atexit._run_exitfuncs()
        os._exit(error.exit_code)

    hook.reports_hpctrain_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
