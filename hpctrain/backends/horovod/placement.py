"""Who this process is, in the variables that hvd.init() reads.

Source: horovod/common/gloo/gloo_context.cc and horovod/common/utils/env_parser.cc, Horovod 0.28.1.
"""

import math
from collections.abc import Mapping, Sequence

from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.settings import Settings
from hpctrain.cluster.launchers.base import MPI
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.interfaces import interface_of

__all__ = ["controller", "slot", "tell"]

# Horovod warns of ranks that wait for others after this part of the time-out, at most this late.
_WARN_PART, _WARN_SECONDS = 0.1, 60
_FUSION, _FUSION_DEFAULT = "HOROVOD_FUSION_THRESHOLD", str(128 * 1024 * 1024)
_fixed: set[str] = set()  # what this process has set once


def controller(env: Mapping[str, str], launcher: str, mpi_built: bool) -> str:
    """Over what Horovod's ranks agree: "gloo" or "mpi".

    What HOROVOD_CONTROLLER says, as horovodrun sets it; MPI where MPI's launcher started the ranks
    and Horovod was built with it; otherwise gloo, for which rank 0 is all that is needed.
    """
    said = env.get("HOROVOD_CONTROLLER", "").lower()
    if said in ("gloo", "mpi"):
        return said
    return "mpi" if mpi_built and launcher in MPI else "gloo"


def slot(rank: int, host_of_rank: Sequence[int]) -> dict[str, str]:
    """The place of a rank, as horovodrun's SlotInfo has it.

    The cross rank is the index of the host among those that have this local rank.
    """
    host, size = host_of_rank[rank], len(host_of_rank)
    on_host: dict[int, list[int]] = {}
    for other in range(size):
        on_host.setdefault(host_of_rank[other], []).append(other)
    local_rank = on_host[host].index(rank)
    peers = [h for h, ranks in sorted(on_host.items()) if len(ranks) > local_rank]
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(len(on_host[host])),
        "HOROVOD_CROSS_RANK": str(peers.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
        # A part of the path of its requests, so not the name, which may be anything.
        "HOROVOD_HOSTNAME": f"host-{host}",
    }


def tell(environment: Environment, over: str, rendezvous: Rendezvous, settings: Settings) -> None:
    """Set what Horovod reads; what a person set of its time-outs stays.

    Args:
        environment: to be put back when the session closes.
        over: "gloo" or "mpi".
        rendezvous: the ranks, their hosts and addresses.
        settings: time-outs, and whether repeats have to be bit-equal.
    """
    world, roster = rendezvous.world, rendezvous.roster
    environment.set("HOROVOD_CONTROLLER", over)
    environment.set("HOROVOD_CPU_OPERATIONS", over)
    if over == "gloo":
        alone = world.world_size == 1
        for name, value in slot(world.rank, roster.host_of_rank).items():
            environment.set(name, value)
        # Without an address Horovod takes the process for the only one.
        environment.set("HOROVOD_GLOO_RENDEZVOUS_ADDR", None if alone else roster.addresses[0])
        environment.set("HOROVOD_GLOO_RENDEZVOUS_PORT", None if alone else str(roster.port))
        environment.set("HOROVOD_GLOO_IFACE", interface_of(roster.addresses[world.rank]))
    limit = math.ceil(settings.timeout)
    warn = max(1, min(_WARN_SECONDS, math.ceil(limit * _WARN_PART)))
    environment.default("HOROVOD_STALL_CHECK_TIME_SECONDS", str(warn))
    environment.default("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(max(limit, warn)))
    environment.default("HOROVOD_GLOO_TIMEOUT_SECONDS", str(limit))
    # Which gradients share a message follows from timing, and the order of the sums from that.
    if settings.deterministic and settings.own["groups"] is not None:
        environment.set("HOROVOD_DISABLE_GROUP_FUSION", "1")
    elif settings.deterministic:
        environment.set(_FUSION, "0")
        _fixed.add(_FUSION)
    elif _FUSION in _fixed:
        # Horovod keeps a threshold that was set until another one is, also in its next init.
        environment.default(_FUSION, _FUSION_DEFAULT)
