"""The rank and place of this process, in the variables that hvd.init() reads.

Source: horovod/common/gloo/gloo_context.cc and horovod/common/utils/env_parser.cc, Horovod 0.28.1.
"""

import math
from collections.abc import Mapping

from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.launchers.base import MPI
from hpctrain.cluster.launchers.frameworks import Horovodrun
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.interfaces import interface_of

__all__ = ["controller", "set_variables"]

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
        for name, value in Horovodrun().environ(world, roster.ranks_per_host, 0).items():
            environment.set(name, value)
        # A part of the path of HTTP requests, so not the host name, which may hold any character.
        environment.set("HOROVOD_HOSTNAME", f"host-{world.node_rank}")
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
