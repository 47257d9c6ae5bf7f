"""Check of the command line of a training script before the script runs."""

import os
from collections.abc import Collection, Sequence
from typing import NoReturn

from hpctrain import backends
from hpctrain.arguments import add_options
from hpctrain.arguments.batches import plan_batches
from hpctrain.arguments.parser import Parser
from hpctrain.arguments.table import Options

__all__ = ["check"]

_OF_BATCHES = {"global_batch", "batch_size", "accumulate", "elastic"}


def check(
    script: str,
    words: Sequence[str],
    own: Collection[str],
    ranks: int | None,
) -> None:
    """Reject training options with which a script cannot train; ignore the script's own options.

    Args:
        script: path of the script.
        words: its command line.
        own: names that the script may set itself, `*` for all. Nothing is concluded from these
            options.
        ranks: number of ranks; None if it is not certain.

    Raises:
        UsageError: an option is invalid, or contradicts another one.
    """
    parser = _TableParser(allow_abbrev=False, add_help=False, prog=os.path.basename(script))
    add_options(parser)
    given = vars(parser.parse_known_args(words)[0])
    if "*" in own:
        return
    chosen = Options.of({name: value for name, value in given.items() if name not in own}, {})
    if ranks is None:
        return
    if "backend" not in own:
        chosen.of_backend(backends.choose(chosen.backend, ranks))
    if not _OF_BATCHES.intersection(own):
        plan_batches(chosen, ranks)


class _TableParser(Parser):
    """Parser that has only the options of the table, and raises its errors."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise self.refusal(message)
