"""Slurm host lists such as `rack[0-3]node[01-40],login`, and the host names in them.

The reference is `scontrol show hostnames` of Slurm 22.05.8. Order and duplicates are kept. Numbers
have the width of the lower end of their range. Comma, space and tab separate names. With two
brackets the last one changes fastest; with more, the order after the last is first, second, and so
on. A name with brackets ends with a bracket. Source: slurm.conf(5) under NodeName.

Lists that scontrol refuses are refused here. Lists that scontrol changes without an error are
also refused (it reads `n[1,2` as `n]` and `2`); tests/cluster/test_hostlist_scontrol.py has both.
"""

import itertools
import re
from collections.abc import Iterable

from hpctrain.errors import UsageError

__all__ = ["compress", "expand"]

# Limits of scontrol: for a range, for a bracket followed by another, and for a number (it counts
# with 64 bits, and goes one step beyond the last number that it prints).
_LONGEST_RANGE = 65536
_LARGEST_NUMBER = 2**64 - 2
# hpctrain's limits, where scontrol has none and uses all memory: sixteen of its longest ranges.
_MOST_HOSTS = 2**20
_MOST_CHARACTERS = 2**26
_TOO_MANY = f"more than {_MOST_HOSTS} hosts, or than {_MOST_CHARACTERS} characters in their names"

# A bracket with its inside, text outside of brackets, separators, or a bracket without its other.
_TOKEN = re.compile(r"\[([^\[\]]*)\]|([^\[\], \t]+)|[, \t]+|([\[\]])")
_NAME = re.compile(r"[^\[\], ]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_DIGITS = "0123456789"
# Names that need no look at each: without brackets, and too short for a number that is too large.
_LONG = len(str(_LARGEST_NUMBER))
_PAIRS = [tens + ones for tens in _DIGITS for ones in _DIGITS]

_Range = tuple[int, int, int]  # low, high, and the width to fill with zeros
_Term = list[tuple[str, list[_Range]]]  # text before each bracket, and ranges of the bracket


def expand(expression: str) -> list[str]:
    """Return all host names of an expression, in its order, with duplicates; none for "".

    Raises:
        UsageError: the expression is malformed, or has more than 1048576 hosts; the message
            contains the position.
    """
    names = expression.replace(" ", ",").split(",")
    plain = expression.isprintable() and "[" not in expression and "]" not in expression
    if plain and max(map(len, names)) < _LONG and len(names) <= _MOST_HOSTS:
        return list(filter(None, names))
    hosts: list[str] = []
    characters = 0
    term: _Term = []
    text, start = "", 0
    for token in _TOKEN.finditer(f"{expression},"):
        body, outside, unbalanced = token.groups()
        position = token.start()
        if not (term or text):
            start = position
        if unbalanced:
            raise _unbalanced(expression, position)
        if outside:
            if not outside.isprintable():
                raise _not_printable(expression, outside, position)
            text = outside
        elif body is not None:
            term.append((text, _ranges(expression, body, position + 1)))
            text = ""
        elif term or text:  # a separator ends a name
            if term and text:
                problem = "text after the last bracket of a name, which Slurm does not accept"
                raise _malformed(expression, position - len(text), problem)
            if not term:
                _check_number(expression, text, start)
            count, length = _size(expression, term, start) if term else (1, len(text))
            characters += count * length
            if len(hosts) + count > _MOST_HOSTS or characters > _MOST_CHARACTERS:
                raise _malformed(expression, start, _TOO_MANY)
            hosts += _names(term) if term else [text]
            term, text = [], ""
    return hosts


def compress(hosts: Iterable[str]) -> str:
    """Return the expression that `expand` turns into these hosts, in their order, with duplicates.

    Adjacent names with the same text before the number share a bracket, and consecutive numbers
    share a range. The result is that of `scontrol show hostlist`, except for ranges that scontrol
    could not read again.

    Raises:
        UsageError: a name cannot be part of a host list, or there are more than 1048576 names.
    """
    names = [hosts] if isinstance(hosts, str) else list(hosts)
    if len(names) > _MOST_HOSTS or sum(map(len, names)) > _MOST_CHARACTERS:
        raise UsageError("HT105", _TOO_MANY, "a list that can be expanded again")
    split = []
    for name in names:
        _check_name(name)
        text = name.rstrip(_DIGITS)
        split.append((text, name[len(text) :]))
    # Names with and without a number cannot share a bracket.
    groups = itertools.groupby(split, key=lambda parts: (parts[0], bool(parts[1])))
    return ",".join(
        _compressed(text, [number for _, number in group]) for (text, _), group in groups
    )


def _ranges(expression: str, body: str, position: int) -> list[_Range]:
    """Parse the ranges of one bracket, such as `01-03,7`."""
    ranges: list[_Range] = []
    for piece in body.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            problem = f"{_shown(piece)} is not a number or a range"
            raise _malformed(expression, position, problem)
        low = _value(match[1])
        high = low if match[2] is None else _value(match[2])
        if high < low:
            raise _malformed(expression, position, f"the range {_shown(piece)} runs backwards")
        if high > _LARGEST_NUMBER:
            raise _malformed(expression, position, "a number larger than Slurm can count")
        if high - low >= _LONGEST_RANGE:
            problem = f"more than {_LONGEST_RANGE} hosts in {_shown(piece)}"
            raise _malformed(expression, position, problem)
        ranges.append((low, high, len(match[1])))
        position += len(piece) + 1
    return ranges


def _size(expression: str, term: _Term, start: int) -> tuple[int, int]:
    """Return the number of hosts of a term and the length of its longest name."""
    hosts, length = 1, 0
    for place, (text, ranges) in enumerate(term, 1):
        numbers = sum(high - low + 1 for low, high, _ in ranges)
        if numbers > _LONGEST_RANGE and place < len(term):
            problem = f"more than {_LONGEST_RANGE} numbers in a bracket that another follows"
            raise _malformed(expression, start, problem)
        hosts *= numbers
        if hosts > _MOST_HOSTS:  # inside the loop: with many brackets the product would become huge
            raise _malformed(expression, start, _TOO_MANY)
        length += len(text) + max(max(width, len(str(high))) for _, high, width in ranges)
    return hosts, length


def _names(term: _Term) -> list[str]:
    """Return the names of one term, `rack[1-2]node[3-4]`; the last bracket changes fastest."""
    *others, last = (
        [name for span in ranges for name in _numbered(text, *span)] for text, ranges in term
    )
    if len(others) < 2:
        return [head + name for head in others[0] for name in last] if others else last
    # After the last bracket scontrol changes the first, then the second, and so on.
    turned = itertools.product(*reversed(others), last)
    return ["".join((*parts[-2::-1], parts[-1])) for parts in turned]


def _numbered(text: str, low: int, high: int, width: int) -> list[str]:
    """Return the text with each number of a range."""
    # Numbers below 100 have hundreds only if the width adds zeros.
    if high - low < 100 or (low < 100 and width < 3):
        return [f"{text}{number:0{width}d}" for number in range(low, high + 1)]
    # Formatting a number takes six times as long as joining two strings. So for a long range only
    # the hundreds are formatted, and 00 to 99 are appended to each.
    first, last = low // 100, high // 100
    hundreds = [f"{text}{number:0{max(width - 2, 1)}d}" for number in range(first, last + 1)]
    names = [head + pair for head in hundreds for pair in _PAIRS]
    return names[low - 100 * first : high - 100 * first + 1]


def _compressed(text: str, numbers: list[str]) -> str:
    """Join names that differ only in their numbers; either all numbers are empty or none is."""
    if not numbers[0] or len(numbers) == 1:
        return ",".join(text + number for number in numbers)
    ranges: list[list[str]] = []
    following, end, width = "", 0, 0
    for number in numbers:
        value = _value(number)
        if number == following and value < end:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
            width = len(number)
            end = value + _LONGEST_RANGE
        following = f"{value + 1:0{width}d}"
    return f"{text}[{','.join(map('-'.join, ranges))}]"


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None or not name.isprintable():
        raise UsageError(
            "HT105",
            f"{_shown(name)} cannot be part of a host list",
            "a name without commas, brackets, spaces and control characters",
        )
    _check_number(name, name, 0)


def _check_number(expression: str, name: str, position: int) -> None:
    """Check the number at the end of a name without brackets."""
    text = name.rstrip(_DIGITS)
    if _value(name[len(text) :]) > _LARGEST_NUMBER:
        problem = "a name that ends in a number larger than Slurm can count"
        raise _malformed(expression, position + len(text), problem)


def _not_printable(expression: str, text: str, position: int) -> UsageError:
    place = next(place for place, character in enumerate(text) if not character.isprintable())
    problem = f"the character {text[place]!r}, which no host name has"
    return _malformed(expression, position + place, problem)


def _value(digits: str) -> int:
    """Return the number, or a number that is too large: int() refuses thousands of digits."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= 20 else _LARGEST_NUMBER + 1


def _unbalanced(expression: str, position: int) -> UsageError:
    """Return the error for a bracket without its other one."""
    if expression[position] == "]":
        return _malformed(expression, position, "a closing bracket that nothing opened")
    following = re.compile(r"[\[\]]").search(expression, position + 1)
    if following is None:
        return _malformed(expression, position, "a bracket that is never closed")
    return _malformed(expression, following.start(), "a bracket inside of a bracket")


def _malformed(expression: str, position: int, problem: str) -> UsageError:
    return UsageError(
        "HT105",
        f"host list {_shown(expression, position)}, position {position}: {problem}",
        "names such as node[01-03,7],login",
        "scontrol show hostnames EXPRESSION (shows how Slurm reads it)",
    )


def _shown(text: str, position: int = 0, longest: int = 160) -> str:
    """Return the text, or for a long text only the part around a position."""
    start = max(0, min(position - longest // 2, len(text) - longest))
    end = start + longest
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"
