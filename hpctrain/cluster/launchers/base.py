"""What a launcher is: a way to recognise who started this process, and to read what it said."""

import dataclasses
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hpctrain.cluster import env_vars
from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError, UsageError

__all__ = [
    "LONGEST_TIMEOUT",
    "MPI",
    "SCHEDULERS",
    "Claim",
    "Claims",
    "Environ",
    "Launcher",
    "RendezvousPoint",
    "Store",
    "host_list",
    "hosts_of_job",
    "is_loopback",
    "port_in",
]

Environ = Mapping[str, str]
# Seconds that a rendezvous may take: about four months. The system's timers do not take any number.
LONGEST_TIMEOUT = 1e7
_REQUIRED = ("rank", "world_size", "local_rank")
# What leads to the host that asks, whichever that is. (127.0.1.1 is a host's own name for itself;
# who calls 0.0.0.0 calls itself.)
_LOOPBACK = re.compile(
    r"(?:localhost(?:[46]?\..*)?|ip6-(?:localhost|loopback)|(?:::ffff:)?127\..*|::1|0\.0\.0\.0|::)\Z",
    re.IGNORECASE,
)
# Agents that found each other at that address before they started the ranks.
_MEETS_ITSELF = frozenset({"torchrun"})

# For `Launcher.inside`: who starts tasks in a job, and who starts the ranks of an MPI program.
SCHEDULERS = frozenset({"slurm", "flux", "pals", "jsrun", "submitit", "prterun", "pmi"})
MPI = frozenset({"openmpi", "mvapich2", "hydra"})


@dataclass(frozen=True, slots=True)
class Claim:
    """One value and the variable that it came from."""

    value: Any
    source: str


Claims = dict[str, Claim]


@dataclass(frozen=True, slots=True)
class Store:
    """The launcher's own store, which it serves for its ranks.

    Attributes:
        kind: "torchrun" (a TCPStore of torch) or "horovodrun" (values by HTTP).
        address, port: where it listens.
    """

    kind: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Where a launcher lets the ranks of one start find each other.

    Attributes:
        key: the same for all ranks of one start, and different for any other start.
        host: the name of this host at the rendezvous.
        address: the name or address of rank 0's host; None where the launcher does not know it.
        port: the first port to try there; None for ports that follow from the key.
        sure: rank 0 is at `address`, and not only likely to be.
        others: the hosts where rank 0 may be as well.
        only_port: nothing but the port tells this start from another one, so no other is tried.
        store: the launcher's own, or None.
        interface: the network interface that the ranks are to use, or None.
        pretended: this machine stands for several hosts, which loopback connects.
        secret: what only the ranks of this start know; may be empty.
    """

    key: str
    host: str
    address: str | None = None
    port: int | None = None
    sure: bool = True
    others: tuple[str, ...] = ()
    only_port: bool = False
    store: Store | None = None
    interface: str | None = None
    simulated: bool = False
    secret: str = dataclasses.field(default="", repr=False)


def host_list(env: Environ, name: str) -> tuple[str, ...]:
    """The hosts in a variable that holds a Slurm host list; none where it is unset or empty.

    Raises:
        ContradictionError: it is malformed.
    """
    try:
        return tuple(expand(env.get(name, "")))
    except UsageError as error:
        raise ContradictionError(f"{name}: {error.found}", error.expected, error.fix) from None


def is_loopback(address: str) -> bool:
    """Whether an address, or a name for it, leads to the host that asks, whichever that is."""
    return _LOOPBACK.match(address) is not None


def hosts_of_job(env: Environ) -> tuple[str, ...]:
    """The hosts of the scheduler's job, in its order: MPI's launchers put rank 0 on the first one.

    Unless they are told otherwise. Source: they take a job's hosts in the scheduler's order;
    "Running jobs under Slurm" in Open MPI's FAQ, "Hydra with resource managers" in MPICH's
    documentation.

    Raises:
        ContradictionError: SLURM_JOB_NODELIST is no host list.
    """
    listed = env.get("LSB_MCPU_HOSTS", "").split()[::2]
    return host_list(env, "SLURM_JOB_NODELIST") or tuple(dict.fromkeys(listed))


class Launcher(ABC):
    """One launcher. A subclass is one file, and one line in the table of `launchers`.

    Attributes:
        name: what `World.launcher` and `$HPCTRAIN_LAUNCHER` call it.
        reason: why it stands at its place in the table.
        marks: the variables that only it sets: one of them, and it is recognised.
        inside: the launchers that may have started this one. Their variables are inherited and
            speak of other processes. Any other launcher whose variables are there has to agree.
        variables: for each field of World the variables that may hold it, the best one first.
        composed: for a field of World the variable that holds more than a number.
        starts: the variables that tell one start of ranks from any other.
        knows_rank_0: the address of `main` is where rank 0 is, and not only likely to be.
    """

    name: ClassVar[str]
    reason: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    inside: ClassVar[frozenset[str]] = frozenset()
    variables: ClassVar[Mapping[str, tuple[str, ...]]]
    composed: ClassVar[Mapping[str, str]] = {}
    starts: ClassVar[tuple[str, ...]] = ()
    knows_rank_0: ClassVar[bool] = False

    @abstractmethod
    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """The inverse of `world`: what this launcher would put into the process of one rank.

        Args:
            world: the rank, complete.
            tasks_per_node: the number of ranks on each host.
            start: a number that no other start has.
        """

    def matches(self, env: Environ) -> bool:
        """Whether this launcher's variables are there.

        A single mark is enough, so that an environment of which a part was lost is refused when
        it is read, and never taken for a process that is alone.
        """
        return any(env.get(name) for name in self.marks)

    @property
    def recognised_by(self) -> str:
        """What has to be there, in words."""
        return " or ".join(self.marks)

    def readable(self) -> Iterator[tuple[str, str]]:
        """Each field of World with a variable that may hold it, the best one of a field first."""
        for field, names in self.variables.items():
            yield from ((field, name) for name in names)
        yield from self.composed.items()

    def key(self, env: Environ) -> str:
        """What tells this start from any other; the same for all of its ranks."""
        return "/".join([self.name, *(env.get(name, "") for name in self.starts)])

    def claims(self, env: Environ) -> Claims:
        """What the variables say, field by field; a field that nothing names is left out.

        Raises:
            ContradictionError: a variable cannot be read.
        """
        claims: Claims = {}
        for field, names in self.variables.items():
            for name in names:
                value = env_vars.number(env, name)
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
        missing = [field for field in _REQUIRED if field not in claims]
        if missing:
            names = [self.variables[field] for field in missing]
            seen = dict.fromkeys((*self.marks, *(claim.source for claim in claims.values())))
            present = ", ".join(f"{name}={env[name]}" for name in seen if env.get(name))
            raise ContradictionError(
                f"{present or 'no value'}, but no {' and no '.join(map(' or '.join, names))}: "
                f"{self.name} left no {' and no '.join(missing)}",
                "all of rank, world size and local rank",
                f"export {' '.join(f'{one[0]}=…' for one in names)}    or, to train as a single "
                f"process: env {env_vars.LAUNCHER}=none COMMAND",
            )
        try:
            return World(**{k: c.value for k, c in claims.items()}, launcher=self.name)
        except ContradictionError as error:
            sources = ", ".join(f"{c.source}={env[c.source]}" for c in claims.values())
            raise ContradictionError(
                f"{error.found}: {sources}", error.expected, error.fix
            ) from None

    def rendezvous_point(self, env: Environ, world: World) -> RendezvousPoint:
        """Where the ranks meet: the address that a person gave, else what the launcher knows.

        Raises:
            ContradictionError: a port that is no number, an address that several hosts cannot
                share, two interfaces.
        """
        address, port = self.main(env, world)
        given = env.get(env_vars.MAIN_ADDRESS)
        simulated = bool(env.get(env_vars.HOSTNAME))
        if not simulated:
            self._refuse_loopback(env, world, given or address)
        return RendezvousPoint(
            key=self.key(env),
            host=env.get(env_vars.HOSTNAME) or socket.gethostname(),
            address=given or address,
            port=port_in(env, env_vars.MAIN_PORT) or port,
            sure=bool(given or env.get("MASTER_ADDR") or (self.knows_rank_0 and address)),
            others=() if given else self.others(env, world),
            only_port=self.only_port(env),
            store=None if given else self.store(env),
            interface=_interface(env),
            simulated=simulated,
            secret=env.get(env_vars.SECRET, ""),
        )

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """The address of rank 0's host and the first port to try, as far as this launcher knows."""
        del world
        return env.get("MASTER_ADDR") or None, port_in(env, "MASTER_PORT")

    def others(self, env: Environ, world: World) -> tuple[str, ...]:
        """The hosts where rank 0 may be, if it is not at the address of `main`."""
        del world
        return () if env.get("MASTER_ADDR") or self.knows_rank_0 else hosts_of_job(env)

    def store(self, env: Environ) -> Store | None:
        """The store that the launcher serves."""
        del env
        return None

    def only_port(self, env: Environ) -> bool:
        """Whether only the port tells this start from another."""
        del env
        return False

    def _refuse_loopback(self, env: Environ, world: World, address: str | None) -> None:
        if address is None or self.name in _MEETS_ITSELF or world.on_one_host is not False:
            return
        if is_loopback(address):
            name = env_vars.MAIN_ADDRESS if env.get(env_vars.MAIN_ADDRESS) else "MASTER_ADDR"
            raise ContradictionError(
                f"{name}={address}, and the ranks of {self.name} are on "
                f"{world.num_nodes or 'several'} hosts: from each of them it leads to itself",
                "an address of rank 0's host that the others reach",
                f"unset {name}"
                if self.knows_rank_0 or hosts_of_job(env)
                else f"export {name}=HOST    (the host of rank 0, the same on all ranks)",
            )


def port_in(env: Environ, name: str) -> int | None:
    """The port in a variable; None where it is unset, empty or 0.

    Raises:
        ContradictionError: it holds no port.
    """
    port = env_vars.number(env, name)
    if port is not None and not 0 <= port < 1 << 16:
        raise ContradictionError(f"{name}={port}", "a port from 1 to 65535", f"unset {name}")
    return port or None


def _interface(env: Environ) -> str | None:
    """The interface that a person chose: for all of this, or for gloo alone.

    Raises:
        ContradictionError: two different ones.
    """
    ours, gloo = env.get(env_vars.INTERFACE), env.get(env_vars.GLOO_INTERFACE)
    first = (gloo or "").split(",")[0]
    if ours and gloo and ours != first:
        raise ContradictionError(
            f"{env_vars.INTERFACE}={ours} and {env_vars.GLOO_INTERFACE}={gloo}",
            "one network interface",
            f"unset {env_vars.GLOO_INTERFACE}",
        )
    return ours or first or None
