"""Backends, by which ranks communicate: one interface, and a table of its implementations."""

from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster import entry_points
from hpctrain.cluster.launchers import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError, UsageError
from hpctrain.rendezvous import KeyValueStore, Rendezvous

if TYPE_CHECKING:
    import torch

    from hpctrain.backends.base import Backend

__all__ = [
    "BACKENDS",
    "BackendSettings",
    "agent_store",
    "check",
    "choose",
    "names",
    "open_backend",
    "options_of",
]

# The class of each backend by name, imported only when it is needed.
BACKENDS = {
    "single": "hpctrain.backends.single:Single",
    "ddp": "hpctrain.backends.ddp:DDP",
    "fsdp": "hpctrain.backends.fsdp:FSDP",
    "horovod": "hpctrain.backends.horovod:Horovod",
    "dataparallel": "hpctrain.backends.dataparallel:DataParallel",
}


def names() -> tuple[str, ...]:
    """Return the names of all backends, with those of other packages; imports none."""
    added = (entry.name for entry in entry_points.found(entry_points.BACKENDS))
    return tuple(dict.fromkeys((*BACKENDS, *added)))


def options_of(name: str) -> str:
    """Return the built-in backend whose options a backend has: itself, or one that it extends.

    Raises:
        UsageError: an entry point of another package cannot be used.
    """
    if name in BACKENDS:
        return name
    names_of_bases = (str(vars(one).get("name")) for one in _class(name).__mro__)
    return next((base for base in names_of_bases if base in BACKENDS), "")


def choose(name: str, world_size: int) -> str:
    """Return the name of the backend; `auto` becomes `single` for one rank, `ddp` for several.

    Raises:
        ContradictionError: `single` for several ranks, which would each train alone.
    """
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    if name == "single" and world_size > 1:
        raise ContradictionError("HT301.single-with-several-ranks", ranks=world_size)
    return name


def agent_store(point: RendezvousPoint, timeout: float) -> KeyValueStore | None:
    """Return the store of torchrun's agent, or None if the ranks have no such store.

    Args:
        point: rendezvous point, from the launcher.
        timeout: seconds to connect to the store.

    Raises:
        StartError: the store does not answer.
    """
    if point.store is None or point.store.kind != "torchrun":
        return None
    from hpctrain.backends.distributed import AgentStore

    return AgentStore(point.store, timeout)


def check(name: str, world: World, device: "torch.device", settings: BackendSettings) -> None:
    """Check whether a backend can work, before the rendezvous.

    Raises:
        UsageError: the backend is not installed, or the settings contradict each other.
    """
    backend = _class(name)
    if device.type == "mps" and name != "single":
        raise UsageError("HT116.backend-on-a-mac", backend=name)
    backend.check(world, device, settings)


def open_backend(
    name: str, rendezvous: Rendezvous, device: "torch.device", settings: BackendSettings
) -> "Backend":
    """Open a backend by name, and compare its rank and world size with the World.

    Args:
        name: one of `names`.
        rendezvous: all ranks, with their hosts and addresses.
        device: device used by this rank.
        settings: settings of the backend.

    Raises:
        ContradictionError: the rank or world size of the backend differs from the launcher's.
    """
    backend = _class(name)(rendezvous, device, settings)
    world = rendezvous.world
    if (backend.rank, backend.world_size) != (world.rank, world.world_size):
        error = ContradictionError(backend.mismatch, name=name, backend=backend, world=world)
        backend.close(error.found)
        raise error
    return backend


def _class(name: str) -> type["Backend"]:
    from hpctrain.backends.base import Backend

    added = entry_points.load(entry_points.BACKENDS, Backend, BACKENDS)  # type: ignore[type-abstract]
    if name in added:
        return added[name]
    module, _, kind = BACKENDS[name].partition(":")
    found: type[Backend] = getattr(import_module(module), kind)
    return found
