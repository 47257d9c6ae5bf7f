"""The plan of a launch: what the ranks run, by which rules, and the place of a host."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from hpctrain.cluster import env_vars
from hpctrain.cluster.world import World
from hpctrain.errors import exit_codes
from hpctrain.launch import cores, rank_environment

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a launch does: the same on all hosts, but for the place of a host in an attempt.

    Attributes:
        command: program and arguments of each rank.
        folder: folder of this launch that all hosts share; only this user can read it. Empty if
            `temporary`.
        launch: name of this launch, the same for all its attempts.
        temporary: whether this host has an `hpctrain run` of its own, without a supervisor: one
            attempt, and no cores of their own for the ranks.
        staging: what each host copies to its own disk: code, environment, data; empty for nothing.
        container: image in which the ranks run; empty for none.
        variables: names of variables that override those of the image.
        label: label of the job and number of its start, for the folder of the copies.
        max_fruitless: number of attempts in a row without a new checkpoint after which the run is
            given up; 1 for a single attempt.
        plain: whether a program without a session is started again, too.
        elastic: whether an attempt may have fewer hosts than the one before.
        min_ranks: smallest number of ranks.
        requeue_plain: whether a stop signal ends a program without a session, and counts as a stop.
        spares: number of hosts that have no ranks until another one is lost.
        attempt: number of earlier attempts.
        fresh: whether the ranks of this attempt are new interpreters.
        hosts: names of the hosts of this attempt, in the order of the ranks.
        counts: number of ranks of each of them.
        index: index of this host.
        main_address: address of the first host, reachable from all hosts.
        own_address: address of this host, reachable from all hosts.
        ports: `ports` of the `Stores` on the first host.
    """

    command: Sequence[str]
    folder: str
    launch: str = ""
    temporary: bool = False
    staging: Sequence[str] = ("", "", "")
    container: str = ""
    variables: Sequence[str] = ()
    label: str = "0-0"
    max_fruitless: int = exit_codes.MOST_FRUITLESS
    plain: bool = False
    elastic: bool = False
    min_ranks: int = 1
    requeue_plain: bool = False
    spares: int = 0
    attempt: int = 0
    fresh: bool = False
    hosts: Sequence[str] = ()
    counts: Sequence[int] = ()
    index: int = 0
    main_address: str = ""
    own_address: str = ""
    ports: Sequence[int] = ()

    def of_all_hosts(self) -> str:
        """Return the plan without the place of a host, as JSON; long, as it names all hosts."""
        return json.dumps(asdict(replace(self, index=0, own_address="")))

    @classmethod
    def of_host(cls, text: str, index: int, own_address: str) -> "Plan":
        """Return the plan of a host from that of all hosts."""
        return cls(**{**json.loads(text), "index": index, "own_address": own_address})

    @property
    def here(self) -> int:
        """Number of ranks of this host."""
        return self.counts[self.index]

    @property
    def world(self) -> World:
        """Place of this host among the hosts, each of which counts as one rank."""
        size = len(self.hosts)
        return World(self.index, size, 0, 1, self.index, size, tuple(self.hosts))

    def environs(self, env: Mapping[str, str]) -> dict[int, dict[str, str]]:
        """Return the environment of each rank of this host.

        Args:
            env: environment to start from.
        """
        environs = rank_environment.environs_of_host(
            self.world,
            self.counts,
            env,
            start=f"{self.launch}/{self.attempt}",
            main_address=self.main_address,
            own_address=self.own_address,
            secret=env.get(env_vars.SECRET) or self.launch,
            ports=self.ports,
            restarts=self.attempt,
        )
        kept = {name: env[name] for name in (env_vars.HOSTNAME,) if env.get(name)}
        if self.fresh:
            kept[env_vars.FRESH] = "1"
        return {rank: {**environ, **kept} for rank, environ in environs.items()}

    def cores(self, env: Mapping[str, str]) -> list[set[int]] | None:
        """Return the cores of each rank of this host; None if the ranks are not to be bound."""
        return None if self.temporary else cores.divided(self.here, env)
