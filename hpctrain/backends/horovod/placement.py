"""The rank and place of this process, in the variables that hvd.init() reads.

Source: horovod/common/gloo/gloo_context.cc and horovod/common/utils/env_parser.cc, Horovod 0.28.1.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.launchers.base import MPI
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.interfaces import interface_of

__all__ = ["controller", "set_variables", "slot"]

# Horovod warns about ranks that wait after this part of the time-out, at most after these seconds.
_WARN_PART, _WARN_SECONDS = 0.1, 60
_FUSION, _FUSION_DEFAULT = "HOROVOD_FUSION_THRESHOLD", str(128 * 1024 * 1024)
_fixed: set[str] = set()  # variables that this process has set once


def controller(env: Mapping[str, str], launcher: str, mpi_built: bool) -> str:
    """Return the library over which Horovod's ranks coordinate: "gloo" or "mpi".

    This is the value of HOROVOD_CONTROLLER, if set, as horovodrun does. Otherwise it is MPI if an
    MPI launcher started the ranks and Horovod was built with MPI. Otherwise it is gloo, which needs
    only rank 0.
    """
    chosen = env.get("HOROVOD_CONTROLLER", "").lower()
    if chosen in ("gloo", "mpi"):
        return chosen
    return "mpi" if mpi_built and launcher in MPI else "gloo"


def slot(rank: int, host_of_rank: Sequence[int]) -> dict[str, str]:
    """Return the place of a rank in Horovod's variables, as in horovodrun's SlotInfo.

    The cross rank is the index of the host among those that have this local rank.
    """
    host, sizes = host_of_rank[rank], Counter(host_of_rank)
    local_rank = host_of_rank[:rank].count(host)
    peers = [h for h, size in sorted(sizes.items()) if size > local_rank]
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(host_of_rank)),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(sizes[host]),
        "HOROVOD_CROSS_RANK": str(peers.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
        # A part of the path of HTTP requests, so not the host name, which may hold any character.
        "HOROVOD_HOSTNAME": f"host-{host}",
    }


def set_variables(
    environment: Environment,
    over: str,
    rendezvous: Rendezvous,
    settings: BackendSettings,
    port: int | None,
) -> None:
    """Set the variables that Horovod reads; time-outs that the user has set stay.

    Args:
        environment: environment to change; restored when the session closes.
        over: library from `controller`, "gloo" or "mpi".
        rendezvous: all ranks, with their hosts and addresses.
        settings: time-outs, and whether repeated runs have to be bit-equal.
        port: port of Horovod's store on rank 0; None for one rank.
    """
    world, roster = rendezvous.world, rendezvous.roster
    environment.set("HOROVOD_CONTROLLER", over)
    environment.set("HOROVOD_CPU_OPERATIONS", over)
    if over == "gloo":
        for name, value in slot(world.rank, roster.host_of_rank).items():
            environment.set(name, value)
        # Without an address Horovod assumes that this is the only process.
        environment.set("HOROVOD_GLOO_RENDEZVOUS_ADDR", roster.addresses[0] if port else None)
        environment.set("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port) if port else None)
        environment.set("HOROVOD_GLOO_IFACE", interface_of(roster.addresses[world.rank]))
    limit = math.ceil(settings.timeout)
    warn = max(1, min(_WARN_SECONDS, math.ceil(limit * _WARN_PART)))
    environment.default("HOROVOD_STALL_CHECK_TIME_SECONDS", str(warn))
    environment.default("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(max(limit, warn)))
    environment.default("HOROVOD_GLOO_TIMEOUT_SECONDS", str(limit))
    # Timing decides which gradients share a message, and so the order of the sums.
    if settings.deterministic and settings.own["groups"] is not None:
        environment.set("HOROVOD_DISABLE_GROUP_FUSION", "1")
    elif settings.deterministic:
        environment.set(_FUSION, "0")
        _fixed.add(_FUSION)
    elif _FUSION in _fixed:
        # Horovod keeps a threshold, even in its next init, until another one is set.
        environment.default(_FUSION, _FUSION_DEFAULT)
