"""Slurm host lists such as `rack[0-3]node[01-40],login`, and the host names in them.

The reference is `scontrol show hostnames` of Slurm 22.05.8. Order and duplicates are kept. Numbers
have the width of the lower end of their range. Comma, space and tab separate names. With two
brackets the last one changes fastest; with more, the order after the last is first, second, and so
on. A name with brackets ends with a bracket. Source: slurm.conf(5) under NodeName.
"""

import itertools
import re
from collections.abc import Iterable

from hpctrain.errors import UsageError

__all__ = ["compress", "expand"]

# scontrol has a limit for one range only, and else uses all memory.
_MAX_RANGE, _MAX_HOSTS, _MAX_CHARACTERS = 2**16, 2**20, 2**26
_MAX_SHOWN = 80

# A name whose brackets have both ends, or a bracket without its other end.
_TOKEN = re.compile(r"((?:[^\[\], \t]++|\[[^\[\]]*+\])++)|([\[\]])")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{0,18})")
_PAIRS = [f"{number:02}" for number in range(100)]


def expand(expression: str) -> list[str]:
    """Return all host names of an expression, in its order, with duplicates; none for "".

    Raises:
        UsageError: the expression is malformed, or has more than 1048576 hosts.
    """
    if not expression.replace("\t", " ").isprintable():
        raise UsageError("HT105.bad-character", text=_short(expression))
    if "[" not in expression and "]" not in expression:
        names = expression.replace("\t", ",").replace(" ", ",").split(",")
        if len(names) > _MAX_HOSTS:
            raise _too_many(expression)
        return list(filter(None, names))
    hosts: list[str] = []
    characters = 0
    for token in _TOKEN.finditer(expression):
        name, bracket = token.groups()
        if bracket:
            begin = len(re.split("[, \t]", expression[: token.start()])[-1])
            rest = expression[token.start() - begin :]
            raise UsageError("HT105.open-bracket", text=_short(rest), bracket=bracket)
        *pairs, end = re.split(r"\[(.*?)\]", name)
        if pairs and end:
            raise UsageError("HT105.text-after-bracket", text=_short(name), end=_short(end))
        lists: list[list[str]] = []
        count, length = 1, len(end)
        for text, ranges in zip(pairs[::2], pairs[1::2], strict=True):
            lists.append(_numbered(text, ranges, name))
            count *= len(lists[-1])
            length += len(text) + max(map(len, ranges.split(",")))
            if len(hosts) + count > _MAX_HOSTS or characters + count * length > _MAX_CHARACTERS:
                raise _too_many(name)
        characters += count * length
        hosts += _joined(lists) if lists else [name]
    return hosts


def compress(hosts: Iterable[str]) -> str:
    """Return the expression that `expand` turns into these hosts, in their order.

    Adjacent names that differ only in the number at their end share a bracket, and consecutive
    numbers share a range, as by `scontrol show hostlist`.
    """
    terms: list[str] = []
    parts = [match.groups() for match in map(_NUMBERED.fullmatch, hosts) if match]
    # Names with and without a number cannot share a bracket.
    for (text, _), group in itertools.groupby(parts, lambda part: (part[0], bool(part[1]))):
        numbers = [number for _, number in group]
        if len(numbers) == 1 or not numbers[0]:
            terms += [text + number for number in numbers]
            continue
        ranges: list[list[str]] = []
        following = ""
        for number in numbers:
            if number == following:
                ranges[-1][1:] = [number]
            else:
                ranges.append([number])
            following = f"{int(number) + 1:0{len(ranges[-1][0])}}"
        terms.append(f"{text}[{','.join(map('-'.join, ranges))}]")
    return ",".join(terms)


def _numbered(text: str, ranges: str, name: str) -> list[str]:
    """Return a text with each number of the ranges in a bracket."""
    names: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else -1
        if match is None or not low <= high < low + _MAX_RANGE:
            raise UsageError(
                "HT105.bad-range", text=_short(name), part=_short(part), max_range=_MAX_RANGE
            )
        if len(names) > _MAX_HOSTS:
            raise _too_many(name)
        width = len(match[1])
        if high - low < 100 or (low < 100 and width < 3):
            names += [f"{text}{number:0{width}}" for number in range(low, high + 1)]
        else:  # formatting hundreds, and joining 00 to 99 to each, takes a quarter of the time
            hundreds = range(low // 100, high // 100 + 1)
            heads = [f"{text}{number:0{max(width - 2, 1)}}" for number in hundreds]
            joined = [head + pair for head in heads for pair in _PAIRS]
            names += joined[low % 100 : len(joined) - 99 + high % 100]
    return names


def _joined(lists: list[list[str]]) -> list[str]:
    """Return the names of a term; after the last bracket the first one changes, then the second."""
    *others, last = lists
    heads = ["".join(reversed(parts)) for parts in itertools.product(*reversed(others))]
    return [head + name for head in heads for name in last]


def _too_many(text: str) -> UsageError:
    key, characters = "HT105.too-many-hosts", _MAX_CHARACTERS
    return UsageError(key, text=_short(text), max_hosts=_MAX_HOSTS, characters=characters)


def _short(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
