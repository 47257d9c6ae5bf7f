"""Texts that the messages of several packages have in common."""

import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = [
    "first_line",
    "listed",
    "nearest",
    "option_meant",
    "printable",
    "ranks_text",
    "shortened",
    "similar",
    "user_name",
]

_MOST_WORDS = 8


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def listed(words: Sequence[str]) -> str:
    """Join words as `a`, `a and b` or `a, b and c`; after eight words there is only `…`."""
    if len(words) > _MOST_WORDS:
        return f"{', '.join(words[:_MOST_WORDS])}, …"
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def ranks_text(
    ranks: Collection[int],
    hosts: Mapping[int, str] | Sequence[str] | None = None,
    noun: str = "rank",
) -> str:
    """Format ranks as `rank 3`, `ranks 3, 5 and 7-9` or `ranks 3 and 5 on node7`.

    Args:
        ranks: numbers of the ranks.
        hosts: host name by rank, if the text has to name the hosts too.
        noun: what the numbers count.
    """
    numbers = sorted(ranks)
    spans: list[str] = []
    # In successive numbers, all have the same distance to their positions.
    for _, row in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        span = [str(rank) for _, rank in row]
        spans += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else span
    text = f"{noun}{'s' if len(numbers) > 1 else ''} {listed(spans)}"
    if len(spans) > _MOST_WORDS:
        text += f" ({len(numbers)} {noun}s)"
    if hosts is None:
        return text
    return f"{text} on {listed(list(dict.fromkeys(hosts[rank] for rank in numbers)))}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that a misspelt word may mean; empty if none is similar.

    Args:
        word: misspelt word; upper case, - and _ make no difference.
        known: words to choose from.
        cutoff: smallest similarity, from 0 to 1.
    """
    return next(iter(similar(word, known, 1, cutoff)), "")


def similar(word: str, known: Iterable[str], number: int, cutoff: float = 0.6) -> list[str]:
    """Return the known words that a misspelt word may mean, the most similar first.

    Args:
        word, known, cutoff: as for `nearest`.
        number: max number of words.
    """
    import difflib  # seldom needed

    by_form = {_form(one): one for one in known}
    return [
        by_form[form] for form in difflib.get_close_matches(_form(word), by_form, number, cutoff)
    ]


def option_meant(message: str, options: Iterable[str]) -> str:
    """Return the option that is meant by an unknown one in a message of argparse; empty if none.

    Args:
        message: message of argparse, of any kind.
        options: known options.
    """
    unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
    if not message.startswith("unrecognized") or not unknown.startswith("--"):
        return ""
    known = list(options)
    completions = (option for option in known if option.startswith(unknown))
    return next(completions, None) or nearest(unknown, known)


def shortened(text: str, longest: int) -> str:
    """Return a text, cut to a number of characters of which the last one is then `…`."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def user_name() -> str:
    """Return the name of this user; its number if it has no name on this host."""
    import getpass  # seldom needed

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def _form(word: str) -> str:
    return word.lower().replace("_", "-")


def printable(value: object) -> str:
    r"""Return a value as one line of text that is safe on a terminal, with escapes such as \x1b."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))
