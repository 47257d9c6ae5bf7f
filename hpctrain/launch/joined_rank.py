"""Rank that another launcher has started: it joins the others, and becomes the program.

`srun hpctrain run SCRIPT` starts this in each task. The tasks find each other by the rendezvous.
Then each sets the variables of `rank_environment.of_rank`, and runs the program in its own place,
so that signals and the exit code are those of the program.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hpctrain.cluster import launchers
from hpctrain.launch import script_source
from hpctrain.launch.rank_environment import of_rank
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import no_program, serve_stores
from hpctrain.launch.stores import Stores
from hpctrain.rendezvous import Answer, Roster, meet

__all__ = ["join"]

_CHOSEN = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")


def join(command: Sequence[str], start: launchers.Start, env: Mapping[str, str]) -> NoReturn:
    """Find the other ranks, and run the command in place of this process.

    Args:
        command: program and arguments.
        start: start of this process.
        env: environment of this process.

    Raises:
        UsageError: this process is not a separate rank, tasks of the job would be idle, or there is
            no such program.
        StartError: not all ranks have connected.
    """
    local = bool(start.world.on_one_host)
    stores = Stores(local) if start.world.rank == 0 else None
    entry = {"ports": stores.ports if stores else None}
    point = start.rendezvous_point
    mistake = start.stray or start.waste
    met = meet(start.world, point, entry, announce=announce, error=mistake, check=_ports, option="")
    if met.listener is not None:
        met.listener.close()
    world, roster = met.world, met.roster
    of_this_rank = of_rank(
        world,
        roster.ranks_per_host,
        env,
        start=met.nonce,
        main_address=roster.addresses[0],
        own_address=roster.addresses[world.rank],
        secret=point.secret or met.nonce,
        ports=met.shared,
    )
    environ = {**env, **of_this_rank}
    source = script_source.read(command, os.getcwd(), environ)
    source.check(world.world_size)
    if world.rank == 0:
        source.announce()
    environ |= source.environ(environ, met.shared[2])
    command = source.command(command, environ)
    # Under mpirun, a person may have chosen MPI for Horovod.
    environ |= {name: env[name] for name in _CHOSEN if name in env}
    if stores is not None:
        serve_stores(stores)
    try:
        os.execvpe(command[0], list(command), environ)  # noqa: S606
    except OSError as error:
        raise no_program(command[0], error, environ) from None


def _ports(roster: Roster) -> Answer:
    """Return the ports of the stores, which rank 0 has chosen, for all ranks."""
    return Answer(shared=roster.entries[0]["ports"])
