"""How do the ranks talk? One protocol, and a table of those who speak it."""

from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain.backends.settings import Settings
from hpctrain.cluster.launchers import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError
from hpctrain.rendezvous import KeyValueStore, Rendezvous

if TYPE_CHECKING:
    import torch

    from hpctrain.backends.base import Backend

__all__ = ["BACKENDS", "Settings", "agent_store", "check", "choose", "open_backend"]

# A name and the class behind it, imported when it is asked for.
BACKENDS = {
    "single": "hpctrain.backends.single:Single",
    "ddp": "hpctrain.backends.ddp:DDP",
    "horovod": "hpctrain.backends.horovod:Horovod",
    "dataparallel": "hpctrain.backends.dataparallel:DataParallel",
}


def choose(name: str, world_size: int) -> str:
    """The backend behind `auto`: nobody to talk to, or torch.distributed.

    Raises:
        ContradictionError: `single` for several ranks, which would each train alone.
    """
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    if name == "single" and world_size > 1:
        raise ContradictionError(
            f"--backend single in a world of {world_size} ranks",
            "a backend that lets them talk",
            "--backend ddp, or start one process",
        )
    return name


def agent_store(point: RendezvousPoint, timeout: float) -> KeyValueStore | None:
    """The store of torchrun's agent, where its ranks may use it.

    Args:
        point: where the ranks meet.
        timeout: seconds to find it.

    Raises:
        StartError: it does not answer.
    """
    if point.store is None or point.store.kind != "torchrun":
        return None
    from hpctrain.backends.ddp import AgentStore

    return AgentStore(point.store, timeout)


def check(name: str, world: World, device: "torch.device", settings: Settings) -> None:
    """Look for what keeps a backend from working, before the ranks meet.

    Raises:
        UsageError: it is not installed, or the settings contradict each other.
    """
    _class(name).check(world, device, settings)


def open_backend(
    name: str, rendezvous: Rendezvous, device: "torch.device", settings: Settings
) -> "Backend":
    """Open a backend by name and hold it against the World.

    Args:
        name: a key of the table.
        rendezvous: the ranks, their hosts and addresses.
        device: of this rank.
        settings: how it has to work.

    Raises:
        ContradictionError: the backend counts other ranks than the launcher.
    """
    backend = _class(name)(rendezvous, device, settings)
    world = rendezvous.world
    if (backend.rank, backend.world_size) != (world.rank, world.world_size):
        found = (
            f"{name} over {backend.transport} says rank {backend.rank} of {backend.world_size}, "
            f"{world.launcher} says rank {world.rank} of {world.world_size}"
        )
        backend.close(found)
        raise ContradictionError(
            found,
            f"the same in both: either {world.launcher} was misread, or {name} was started by "
            "something else",
            "hpctrain explain    shows where the launcher's numbers came from"
            + (f"; {backend.mismatch_hint}" if backend.mismatch_hint else ""),
        )
    return backend


def _class(name: str) -> type["Backend"]:
    module, _, kind = BACKENDS[name].partition(":")
    found: type[Backend] = getattr(import_module(module), kind)
    return found
