"""What a launcher is: a way to recognise who started this process, and to read what it said."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hpctrain import variables
from hpctrain.errors import ContradictionError
from hpctrain.world import World

__all__ = ["Claim", "Claims", "Environ", "Launcher", "MeetingPoint", "number"]

Environ = Mapping[str, str]
_REQUIRED = ("rank", "world_size", "local_rank")


@dataclass(frozen=True, slots=True)
class Claim:
    """One value and the variable that it came from."""

    value: Any
    source: str


Claims = dict[str, Claim]


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where a launcher lets the ranks of one start find each other.

    Attributes:
        key: the same for all ranks of one start, and different for any other start.
        host: the name of this host at the roll call.
        address: the name or address of rank 0's host; None where the launcher does not know it.
        port: the first port to try there; None for ports that follow from the key.
    """

    key: str
    host: str
    address: str | None = None
    port: int | None = None


def number(env: Environ, name: str) -> int | None:
    """The whole number in a variable; None where it is unset or empty.

    Raises:
        ContradictionError: it holds something else.
    """
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ContradictionError(
            f"{name}={text!r}", f"{name} is a whole number", f"unset {name}"
        ) from None


class Launcher(ABC):
    """One launcher. A subclass is one file, and one line in the table of `launchers`.

    Attributes:
        name: what `World.launcher` and `$HPCTRAIN_LAUNCHER` call it.
        reason: why it stands at its place in the table.
        inside: the launchers that may have started this one. Their variables are inherited and
            speak of other processes. Any other launcher whose variables are there has to agree.
        variables: for each field of World the variables that may hold it, the best one first.
    """

    name: ClassVar[str]
    reason: ClassVar[str]
    inside: ClassVar[frozenset[str]] = frozenset()
    variables: ClassVar[Mapping[str, tuple[str, ...]]]

    @abstractmethod
    def matches(self, env: Environ) -> bool:
        """Whether this launcher's variables are there."""

    @abstractmethod
    def key(self, env: Environ) -> str:
        """What tells this start from any other; the same for all of its ranks."""

    @abstractmethod
    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """The inverse of `world`: what this launcher would put into the process of one rank.

        Args:
            world: the rank, complete.
            tasks_per_node: the number of ranks on each host.
            start: a number that no other start has.
        """

    def claims(self, env: Environ) -> Claims:
        """What the variables say, field by field; a field that nothing names is left out.

        Raises:
            ContradictionError: a variable cannot be read.
        """
        claims: Claims = {}
        for field, names in self.variables.items():
            for name in names:
                value = number(env, name)
                if value is not None:
                    claims[field] = Claim(value, name)
                    break
        return claims

    def world(self, env: Environ) -> World:
        """Who this process is.

        Raises:
            ContradictionError: rank, size or local rank is missing, or values contradict.
        """
        claims = self.claims(env)
        for field in _REQUIRED:
            if field not in claims:
                names = " or ".join(self.variables[field])
                present = ", ".join(f"{c.source}={c.value}" for c in claims.values())
                raise ContradictionError(
                    f"{present or 'no value'}, but no {names}: {self.name} left no {field}",
                    f"all of rank, world size and local rank; {names} has the {field}",
                    f"export {self.variables[field][0]}=…, or unset the others to train as a "
                    "single process",
                )
        try:
            return World(**{k: c.value for k, c in claims.items()}, launcher=self.name)
        except ContradictionError as error:
            sources = ", ".join(
                f"{c.source}={c.value}" for c in claims.values() if isinstance(c.value, int)
            )
            raise ContradictionError(
                f"{error.found}: {sources}", error.expected, error.fix
            ) from None

    def meeting_point(self, env: Environ, world: World) -> MeetingPoint:
        """Where the ranks meet: the address that a person gave, else what the launcher knows.

        Raises:
            ContradictionError: a port that is no number.
        """
        address, port = self.main(env, world)
        if env.get(variables.MAIN_ADDRESS):
            address, port = env[variables.MAIN_ADDRESS], None
        return MeetingPoint(
            key=self.key(env),
            host=env.get(variables.HOSTNAME) or socket.gethostname(),
            address=address,
            port=_port(env, variables.MAIN_PORT) or port,
        )

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """The address of rank 0's host and the first port to try, as far as this launcher knows."""
        del world
        return env.get("MASTER_ADDR") or None, _port(env, "MASTER_PORT")


def _port(env: Environ, name: str) -> int | None:
    """The port in a variable; None where it is unset, empty or 0.

    Raises:
        ContradictionError: it holds no port.
    """
    port = number(env, name)
    if port is not None and not 0 <= port < 1 << 16:
        raise ContradictionError(f"{name}={port}", "a port from 1 to 65535", f"unset {name}")
    return port or None
