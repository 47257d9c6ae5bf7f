"""Slurm host lists: `node[01-03,7],login` and the names they stand for.

The oracle is `scontrol show hostnames`: order and duplicates are kept, and numbers keep the width
of the lower end of their range.
"""

import itertools
import math
import re

from hpctrain.errors import UsageError

__all__ = ["expand", "first"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z", re.ASCII)
# Slurm's own limit on the hosts of one expression (MAX_RANGE in its hostlist.c, 22.05).
_MOST_HOSTS = 65536
_LONGEST_RANGE = 100


def expand(expression: str) -> list[str]:
    """All host names of an expression, in its order, with its duplicates.

    Raises:
        UsageError: the expression is malformed; the message has the position.
    """
    hosts: list[str] = []
    start = 0
    while start <= len(expression):
        term, end = _term(expression, start)
        if term.strip():
            hosts += _names(expression, term, start)
            if len(hosts) > _MOST_HOSTS:
                raise _malformed(expression, start, f"more than {_MOST_HOSTS} hosts")
        start = end + 1
    return hosts


def first(expression: str) -> str:
    """The first host name of an expression.

    Raises:
        UsageError: the expression is malformed, or names no host.
    """
    hosts = expand(expression)
    if not hosts:
        raise UsageError(f"the host list {expression!r} is empty", "at least one host name")
    return hosts[0]


def _term(expression: str, start: int) -> tuple[str, int]:
    """The text from `start` to the next comma outside of brackets, and where that comma is."""
    inside = False
    for position in range(start, len(expression)):
        character = expression[position]
        if character == "[":
            if inside:
                raise _malformed(expression, position, "a bracket inside of a bracket")
            inside = True
        elif character == "]":
            if not inside:
                raise _malformed(expression, position, "a closing bracket that nothing opened")
            inside = False
        elif character == "," and not inside:
            return expression[start:position], position
    if inside:
        raise _malformed(expression, expression.rindex("["), "a bracket that is never closed")
    return expression[start:], len(expression)


def _names(expression: str, term: str, start: int) -> list[str]:
    """The names of one term, `rack[1-2]node[3-4]`: the last bracket turns fastest."""
    parts: list[list[str]] = []
    position = start
    for piece in re.split(r"(\[[^\]]*\])", term):
        if piece.startswith("["):
            parts.append(_numbers(expression, piece[1:-1], position + 1))
        elif piece:
            parts.append([piece])
        position += len(piece)
    if math.prod(map(len, parts)) > _MOST_HOSTS:
        raise _malformed(expression, start, f"more than {_MOST_HOSTS} hosts in {term}")
    return ["".join(pieces).strip() for pieces in itertools.product(*parts)]


def _numbers(expression: str, body: str, position: int) -> list[str]:
    """The numbers of one bracket, `01-03,7`."""
    numbers: list[str] = []
    for piece in body.split(","):
        match = _RANGE.match(piece)
        if match is None:
            raise _malformed(expression, position, f"{piece!r} is not a number or a range")
        low = match[1]
        high = match[2] or low
        if len(piece) > _LONGEST_RANGE:
            raise _malformed(expression, position, "a range of absurdly many digits")
        if int(high) < int(low):
            raise _malformed(expression, position, f"the range {piece} runs backwards")
        if int(high) - int(low) >= _MOST_HOSTS:
            raise _malformed(expression, position, f"more than {_MOST_HOSTS} hosts in {piece}")
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
        position += len(piece) + 1
    return numbers


def _malformed(expression: str, position: int, why: str) -> UsageError:
    return UsageError(
        f"host list {expression[:200]!r}, position {position}: {why}",
        "names such as node[01-03,7],login",
        "scontrol show hostnames EXPRESSION    shows what Slurm makes of it",
    )
