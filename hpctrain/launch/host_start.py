"""The start of the ranks of one host: the plan that all agents have, and what they agreed on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers import RendezvousPoint
from hpctrain.errors import UsageError
from hpctrain.launch import cores, rank_environment
from hpctrain.rendezvous import Rendezvous

__all__ = ["HostStart", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the agents of a start do, the same on all hosts.

    Attributes:
        command: program and arguments of each rank.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it.
        folder: folder of this start that all hosts share, with the exit status file, the failure
            records of the ranks and the ends of the agents.
        launch: name of the launcher's run, the same for all its attempts (default: a new one).
        attempt: number of earlier attempts.
        temporary: whether the folder is on this host only, and is removed if this process is
            killed. In a job it is not, and each rank gets cores of its own.
        staging: what each host copies to its own disk: code, environment, data.
        container: image in which the ranks run; empty for none.
        label: label of the job and number of the start, for the folder of the copies.
        waits: whether the ranks wait until this process has read the hosts of the attempt from its
            standard input; see `standby`.
    """

    command: Sequence[str]
    nproc: str
    folder: str
    launch: str = ""
    attempt: int = 0
    temporary: bool = False
    staging: Sequence[str] = ("", "", "")
    container: str = ""
    label: str = "0-0"
    waits: bool = False


@dataclass(frozen=True, slots=True)
class HostStart:
    """A start on which the agents have agreed, as one of them knows it.

    Attributes:
        plan: what to do.
        met: rendezvous of the agents.
        counts: number of ranks of each host.
        point: rendezvous point of the agents.
        env: environment to start from.
    """

    plan: Plan
    met: Rendezvous
    counts: Sequence[int]
    point: RendezvousPoint
    env: Mapping[str, str]

    @classmethod
    def of(
        cls, plan: Plan, met: Rendezvous, point: RendezvousPoint, env: Mapping[str, str]
    ) -> "HostStart":
        """Return the start on all hosts.

        Args:
            plan, met, point, env: see the attributes.

        Raises:
            UsageError: there are two agents on a host, or the plan's numbers do not fit the hosts.
        """
        world = met.world
        if world.num_nodes != world.world_size:
            raise UsageError("HT111.hpctrain-run-in-each-task", world=world)
        counts = rank_environment.layout(plan.nproc, met.shared["gpus"])
        return cls(plan, met, counts, point, env)

    @property
    def here(self) -> int:
        """Number of ranks of this host."""
        return self.counts[self.met.world.rank]

    def among(self, hosts: Sequence[str]) -> "HostStart":
        """Return the start on some of its hosts; this one and the first one are among them."""
        old, world = self.met.roster, self.met.world
        kept = [old.hosts.index(host) for host in hosts]
        roster = replace(
            old,
            entries=(),
            addresses=tuple(old.addresses[index] for index in kept),
            hosts=tuple(hosts),
            host_of_rank=tuple(range(len(kept))),
        )
        index, size = kept.index(world.rank), len(kept)
        world = replace(
            world, rank=index, world_size=size, node_rank=index, num_nodes=size, hosts=roster.hosts
        )
        counts = [self.counts[index] for index in kept]
        return replace(self, met=replace(self.met, world=world, roster=roster), counts=counts)

    def environs(self) -> dict[int, dict[str, str]]:
        """Return the environment of each rank of this host."""
        plan, met, env = self.plan, self.met, self.env
        connection = rank_environment.Connection(
            start=f"{plan.launch or met.nonce}/{plan.attempt}",
            main_address=met.roster.addresses[0],
            own_address=met.roster.addresses[met.world.rank],
            secret=env.get(env_vars.SECRET) or met.nonce,
            ports=tuple(met.shared["ports"]),
            restarts=plan.attempt,
        )
        environs = rank_environment.environs_of_host(met.world, self.counts, env, connection)
        more = {env_vars.HOSTNAME: self.point.host} if self.point.simulated else {}
        return {rank: {**environ, **more} for rank, environ in environs.items()}

    def cores(self) -> list[set[int]] | None:
        """Return the cores of each rank of this host; None if the ranks are not to be bound."""
        return None if self.plan.temporary else cores.divided(self.here, self.env)
