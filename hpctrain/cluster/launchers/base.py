"""The base class of all launchers: it recognises a launcher and reads its variables."""

import dataclasses
import re
import socket
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
    "LauncherStore",
    "RendezvousPoint",
    "host_list",
    "hosts_of_job",
    "is_loopback",
    "port_in",
]

Environ = Mapping[str, str]
# Longest timeout of a rendezvous in seconds, about four months. The system's timers have a limit.
LONGEST_TIMEOUT = 1e7
_REQUIRED = ("rank", "world_size", "local_rank")
# Names and addresses that lead each host to itself. (On some systems a host's own name resolves
# to 127.0.1.1; a connection to 0.0.0.0 goes to the same host.)
_LOOPBACK = re.compile(
    r"(?:localhost(?:[46]?\..*)?|ip6-(?:localhost|loopback)|(?:::ffff:)?127\..*|::1|0\.0\.0\.0|::)\Z",
    re.IGNORECASE,
)
# Launchers whose agents have already connected at this address, so it is reachable.
_MEETS_ITSELF = frozenset({"torchrun"})

# For `Launcher.inside`: launchers of tasks in a job, and launchers of MPI programs.
SCHEDULERS = frozenset({"slurm", "flux", "pals", "jsrun", "submitit", "prterun", "pmi"})
MPI = frozenset({"openmpi", "mvapich2", "hydra"})


@dataclass(frozen=True, slots=True)
class Claim:
    """A value and the variable that it came from."""

    value: Any
    source: str


Claims = dict[str, Claim]


@dataclass(frozen=True, slots=True)
class LauncherStore:
    """Key-value store that the launcher serves for its ranks.

    Attributes:
        kind: "torchrun" (a TCPStore of torch) or "horovodrun" (values over HTTP).
        address: address on which the store listens.
        port: port on which the store listens.
    """

    kind: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Address, port and key with which the ranks of one start find each other.

    Attributes:
        key: text that is the same for all ranks of one start and different for other starts.
        host: name of this host at the rendezvous.
        address: name or address of rank 0's host; None if the launcher does not provide it.
        port: first port to try at `address`; None to derive the ports from the key.
        sure: whether rank 0 is certainly at `address`, and not only probably.
        others: other hosts where rank 0 may be.
        only_port: whether only the port identifies this start, so that no other port is tried.
        store: key-value store of the launcher, or None.
        interface: network interface for the ranks, or None.
        simulated: whether this machine simulates several hosts, connected by loopback.
        secret: secret shared by the ranks of this start only; may be empty.
    """

    key: str
    host: str
    address: str | None = None
    port: int | None = None
    sure: bool = True
    others: tuple[str, ...] = ()
    only_port: bool = False
    store: LauncherStore | None = None
    interface: str | None = None
    simulated: bool = False
    secret: str = dataclasses.field(default="", repr=False)


def host_list(env: Environ, name: str) -> tuple[str, ...]:
    """Return the hosts in a variable with a Slurm host list; () if it is unset or empty.

    Raises:
        ContradictionError: the host list is malformed.
    """
    try:
        return tuple(expand(env.get(name, "")))
    except UsageError as error:
        text = f"{name}: {error.found}"
        raise ContradictionError.of_text(error.code, text, error.expected, *error.fixes) from None


def is_loopback(address: str) -> bool:
    """Check whether an address or a name leads each host to itself."""
    return _LOOPBACK.match(address) is not None


def hosts_of_job(env: Environ) -> tuple[str, ...]:
    """Return the hosts of the scheduler's job, in its order.

    MPI's launchers use a job's hosts in the scheduler's order, so by default rank 0 is on the
    first host. Source: "Running jobs under Slurm" in Open MPI's FAQ, "Hydra with resource
    managers" in MPICH's documentation.

    Raises:
        ContradictionError: SLURM_JOB_NODELIST is not a host list.
    """
    listed = env.get("LSB_MCPU_HOSTS", "").split()[::2]
    hosts = host_list(env, "SLURM_JOB_NODELIST") or tuple(dict.fromkeys(listed))
    # Seen with mpirun of Open MPI 6 and Slurm 26.05: in the step of its daemons, the first variable
    # has the hosts of the step.
    whole = host_list(env, "SLURM_NODELIST")
    return whole if whole and set(hosts) < set(whole) else hosts


class Launcher:
    """One launcher: a subclass, and a line in the table of `launchers` or an entry point.

    Attributes:
        name: name in `World.launcher` and `$HPCTRAIN_LAUNCHER`.
        reason: reason for the place of the launcher in the table.
        marks: variables that identify the launcher; one of them is enough.
        recognised_by: text for messages, if it is not the names of `marks`.
        inside: launchers that may have started this one. Their variables are inherited and
            describe other processes. The values of any other launcher have to be the same.
        variables: for each field of World, the variables that may hold it, the best one first.
        composed: for a field of World, the variable with a value that is not a plain number.
        constants: variables that have the same value in every rank of every start.
        starts: variables that distinguish one start of ranks from any other.
        jobs: those of them that identify a job; without one, only the port distinguishes a start.
            Empty if the launcher sets others that do.
        knows_rank_0: whether rank 0 is certainly at the address of `main`, and not only probably.
        before: for a launcher of another package, the name of the built-in launcher that is asked
            after it.
    """

    name: ClassVar[str]
    reason: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()
    recognised_by: ClassVar[str] = ""
    inside: ClassVar[frozenset[str]] = frozenset()
    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    composed: ClassVar[Mapping[str, str]] = {}
    constants: ClassVar[Mapping[str, str]] = {}
    starts: ClassVar[tuple[str, ...]] = ()
    jobs: ClassVar[tuple[str, ...]] = ()
    knows_rank_0: ClassVar[bool] = False
    before: ClassVar[str] = "slurm"

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that this launcher would set for one rank: the inverse of `world`.

        Args:
            world: complete place of the rank.
            tasks_per_node: number of ranks on each host.
            start: number that is unique to this start.
        """
        here = tasks_per_node[world.node_rank or 0]
        values = {**dataclasses.asdict(world), "local_world_size": here}
        return {
            **self.constants,
            **{name: str(start) for name in self.starts[:1]},
            **{names[0]: str(values[field]) for field, names in self.variables.items()},
        }

    def matches(self, env: Environ) -> bool:
        """Check whether variables of this launcher are set.

        One of `marks` is enough. So an environment that lost some of its variables is refused
        later, when it is read, and the process does not train alone.
        """
        return any(env.get(name) for name in self.marks)

    def readable(self) -> Iterator[tuple[str, str]]:
        """Yield each field of World with a variable that may hold it, the best variable first."""
        for field, names in self.variables.items():
            yield from ((field, name) for name in names)
        yield from self.composed.items()

    def key(self, env: Environ) -> str:
        """Return a text that is the same for all ranks of this start and different for others."""
        return "/".join([self.name, *(env.get(name, "") for name in self.starts)])

    def claims(self, env: Environ) -> Claims:
        """Return the value of each field of World; omit the fields that no variable holds.

        Raises:
            ContradictionError: the value of a variable is invalid.
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
        """Return the place of this process among the ranks.

        Raises:
            ContradictionError: rank, world size or local rank is missing, or values contradict
                each other.
        """
        claims = self.claims(env)
        missing = [field for field in _REQUIRED if field not in claims]
        if missing:
            names = [self.variables[field] for field in missing]
            variables = dict.fromkeys((*self.marks, *(claim.source for claim in claims.values())))
            values = [f"{name}={env[name]}" for name in variables if env.get(name)]
            present = ", ".join(values) or "no value"
            absent = " and no ".join(map(" or ".join, names))
            exports = " ".join(f"{first}=…" for first, *_ in names)
            raise ContradictionError(
                "HT102.incomplete", present=present, absent=absent, launcher=self, exports=exports
            )
        try:
            world = World(**{k: c.value for k, c in claims.items()}, launcher=self.name)
            return world.derived()
        except ContradictionError as error:
            sources = ", ".join(f"{c.source}={env[c.source]}" for c in claims.values())
            text = f"{error.found}: {sources}"
            raise error.of_text(error.code, text, error.expected, *error.fixes) from None

    def rendezvous_point(self, env: Environ, world: World) -> RendezvousPoint:
        """Return the rendezvous point: the address set by the user, else that of the launcher.

        Raises:
            ContradictionError: a port is invalid, ranks on several hosts have a loopback address,
                or two interfaces are set.
        """
        address, port = self.main(env, world)
        set_address = env.get(env_vars.MAIN_ADDRESS)
        simulated = bool(env.get(env_vars.HOSTNAME))
        if not simulated:
            self._refuse_loopback(env, world, set_address or address)
        return RendezvousPoint(
            key=self.key(env),
            host=env.get(env_vars.HOSTNAME) or socket.gethostname(),
            address=set_address or address,
            port=port_in(env, env_vars.MAIN_PORT) or port,
            sure=bool(set_address or env.get("MASTER_ADDR") or (self.knows_rank_0 and address)),
            others=() if set_address else self.others(env, world),
            only_port=bool(self.jobs) and not any(env.get(name) for name in self.jobs),
            store=None if set_address else self.store(env),
            interface=_interface(env),
            simulated=simulated,
            secret=env.get(env_vars.SECRET, ""),
        )

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return the address of rank 0's host and the first port to try; None for each unknown."""
        del world
        return env.get("MASTER_ADDR") or None, port_in(env, "MASTER_PORT")

    def others(self, env: Environ, world: World) -> tuple[str, ...]:
        """Return the hosts where rank 0 may be if it is not at the address of `main`."""
        del world
        return () if env.get("MASTER_ADDR") or self.knows_rank_0 else hosts_of_job(env)

    def store(self, env: Environ) -> LauncherStore | None:
        """Return the key-value store that the launcher serves, or None."""
        del env
        return None

    def _refuse_loopback(self, env: Environ, world: World, address: str | None) -> None:
        if address is None or self.name in _MEETS_ITSELF or world.on_one_host is not False:
            return
        if is_loopback(address):
            name = env_vars.MAIN_ADDRESS if env.get(env_vars.MAIN_ADDRESS) else "MASTER_ADDR"
            listed = self.knows_rank_0 or hosts_of_job(env)
            key = "HT106.loopback-address" if listed else "HT106.loopback-without-host-list"
            nodes = world.num_nodes or "several"
            raise ContradictionError(key, name=name, address=address, launcher=self, nodes=nodes)


def port_in(env: Environ, name: str) -> int | None:
    """Return the port in a variable; None if it is unset, empty or 0.

    Raises:
        ContradictionError: the value is not a port.
    """
    port = env_vars.number(env, name)
    if port is not None and not 0 <= port < 1 << 16:
        raise ContradictionError("HT103.port-out-of-range", name=name, port=port)
    return port or None


def _interface(env: Environ) -> str | None:
    """Return the network interface set by the user, for hpctrain or for gloo alone.

    Raises:
        ContradictionError: the two variables name different interfaces.
    """
    ours, gloo = env.get(env_vars.INTERFACE), env.get(env_vars.GLOO_INTERFACE)
    first = (gloo or "").split(",")[0]
    if ours and gloo and ours != first:
        raise ContradictionError("HT107.interfaces-differ", ours=ours, gloo=gloo)
    return ours or first or None
