"""Start of the ranks of this host beside other hosts, each with an `hpctrain run` of its own.

No process supervises them: a person, srun or mpirun has started one on each host. They find each
other by the rendezvous, as ranks do. So each knows all hosts, the number of ranks on each, and the
address of the first host, where the stores for programs without a session are served. Then each
starts the ranks of its host, once, and watches for the loss of another host (`host_watch`).
"""

import queue
import signal
from collections.abc import Mapping
from dataclasses import replace

from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError, UsageError
from hpctrain.launch import rank_environment, supervisor
from hpctrain.launch.agent_links import SECONDS_TO_DETECT
from hpctrain.launch.end import End
from hpctrain.launch.host_ranks import HostRanks
from hpctrain.launch.host_watch import HostWatch
from hpctrain.launch.plan import Plan
from hpctrain.launch.rank_output import announce
from hpctrain.launch.stores import Stores
from hpctrain.launch.supervisor import EndRequest
from hpctrain.rendezvous import Answer, Rendezvous, Roster, meet

__all__ = ["run"]


def run(
    plan: Plan, nproc: str, world: World, point: RendezvousPoint, env: Mapping[str, str]
) -> End:
    """Start the ranks of this host, and return how they ended.

    Args:
        plan: plan of the launch, without the place of this host.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it.
        world: place of this host among the hosts, each of which counts as one rank.
        point: rendezvous point of the hosts.
        env: environment to start from.

    Raises:
        UsageError: the numbers of ranks do not fit the hosts.
        ContradictionError: the hosts have different numbers of ranks.
        StartError: not all hosts have connected, or the system cannot start more processes.
    """
    stores = Stores(bool(world.on_one_host)) if world.rank == 0 else None
    gpus = len(rank_environment.gpus_of(env))
    entry = {"gpus": gpus, "nproc": nproc, "ports": stores.ports if stores else None}
    try:
        met = meet(
            world, point, entry, announce=announce, check=_check_hosts, noun="node", option=""
        )
        if met.world.num_nodes != met.world.world_size:
            raise UsageError("HT111.hpctrain-run-in-each-task", world=met.world)
        roster, index = met.roster, met.world.rank
        plan = replace(
            plan,
            launch=met.nonce,
            hosts=roster.hosts,
            counts=rank_environment.layout(nproc, met.shared["gpus"]),
            index=index,
            main_address=roster.addresses[0],
            own_address=roster.addresses[index],
            ports=met.shared["ports"],
        )
        more = {env_vars.HOSTNAME: point.host} if point.simulated else {}
        ranks = HostRanks({**env, **more}, point.host, gpus)
        try:
            return _watched(plan, met, env.get(env_vars.SECRET, ""), ranks, stores)
        finally:
            ranks.close()
    finally:
        if stores is not None:
            stores.close()


def _check_hosts(roster: Roster) -> Answer:
    """Check whether all hosts have the same number or list of ranks.

    Returns:
        The GPUs of each host, and the ports of the stores on the first one.

    Raises:
        ContradictionError: two hosts differ.
    """
    first = roster.entries[0]
    for entry in roster.entries:
        if entry["nproc"] != first["nproc"]:
            raise ContradictionError("HT213.nproc-per-node-differs", first=first, entry=entry)
    return Answer(shared={"gpus": [e["gpus"] for e in roster.entries], "ports": first["ports"]})


def _watched(
    plan: Plan, met: Rendezvous, secret: str, ranks: HostRanks, stores: Stores | None
) -> End:
    """Run the ranks of this host; end them when another host is lost."""
    events: supervisor.Events = queue.SimpleQueue()
    if met.world.world_size == 1:
        return ranks.run(plan, stores, events)
    watch = HostWatch(met, secret, lambda: events.put(EndRequest(signal.SIGKILL)))
    # When one process has ended, srun ends the others, which still have to find out which host is
    # lost.
    before = signal.signal(signal.SIGTERM, lambda number, _: events.put(number))
    try:
        end = ranks.run(plan, stores, events, meanwhile=watch.look)
    finally:
        watch.close()
        signal.signal(signal.SIGTERM, before)
    if not watch.lost or not end.code:
        return end
    if met.world.rank == 0 or watch.lost == met.roster.hosts[0]:
        announce(f"{watch.lost} is lost: it has not answered for {SECONDS_TO_DETECT} s")
    return replace(end, rank=None) if end.rank is None or end.caused_by_other_rank else end
