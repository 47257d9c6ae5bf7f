"""The import of Horovod, and checks of the installed version and the options."""

import importlib
import importlib.util
import socket
from collections.abc import Mapping
from types import ModuleType

import torch

from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.env_vars import HOSTNAME
from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.cluster.texts import first_line
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError

__all__ = ["load", "refuse_options", "refuse_own_name", "refuse_start"]

BUILD = "hpctrain horovod build"


def load() -> ModuleType:
    """Return the module `horovod.torch`.

    Raises:
        UsageError: Horovod is not installed, or was built for another torch, or without gloo and
            MPI.
    """
    if importlib.util.find_spec("horovod") is None:
        raise UsageError("HT315.not-installed", version=torch.__version__)
    try:
        module = importlib.import_module("horovod.torch")
    except Exception as error:  # a library for another torch may raise anything
        reason, version = first_line(error), torch.__version__
        raise UsageError("HT315.import-failed", reason=reason, version=version) from None
    if not (module.gloo_built() or module.mpi_built()):
        raise UsageError("HT316.horovod-without-gloo-and-mpi")
    return module


def refuse_own_name(world: World, env: Mapping[str, str]) -> None:
    """Raise an error if gloo in Horovod would listen at an address that no other host reaches.

    Horovod 0.28.1 loses its interface setting (GlooContext::InitializeForProcessSet), and gloo then
    uses the address of the host's own name. `hpctrain horovod build` fixes that.

    Raises:
        UsageError: that address is loopback or unknown, and there are several hosts.
    """
    if world.on_one_host is not False or env.get(HOSTNAME):
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = str(error)
    patched = getattr(importlib.import_module("horovod"), "mended_by_hpctrain", False)
    if not patched and (is_loopback(address) or not address[:1].isdigit()):
        raise UsageError("HT307.loopback-address", name=name, address=address)


def refuse_start(hvd: ModuleType, world: World, over: str, mpi_was_used: bool) -> None:
    """Raise an error if Horovod cannot start in this process.

    Args:
        hvd: `horovod.torch`.
        world: place of this rank.
        over: library over which the ranks coordinate, "gloo" or "mpi".
        mpi_was_used: whether this process had a session over Horovod and MPI.
    """
    mpi, gloo = over == "mpi", over == "gloo"
    if hvd.is_initialized():
        raise UsageError("HT308.horovod-initialized")
    if mpi and not hvd.mpi_built():
        raise UsageError("HT316.horovod-without-mpi")
    if mpi and mpi_was_used:
        raise UsageError("HT308.second-session-over-mpi")
    if gloo and not hvd.gloo_built():
        raise UsageError("HT316.horovod-without-gloo", world=world)


def refuse_options(settings: BackendSettings, over: str, world: World) -> None:
    """Raise an error for options that do not work together, or that Horovod would ignore."""
    own, size = settings.own, world.world_size
    factor, groups = own["gradient_predivide_factor"], own["groups"]
    if factor != 1.0 and own["op"] != "average":
        raise UsageError("HT311.predivide-with-op", factor=factor, op=own["op"])
    if factor != 1.0 and groups is not None:
        raise UsageError("HT311.predivide-with-groups", factor=factor, groups=groups)
    if own["op"] != "adasum":
        return
    other = next((n for n in ("groups", "sparse_as_dense") if own[n] not in (None, False)), "")
    if other:
        raise UsageError("HT311.adasum-with-option", option=other.replace("_", "-"))
    if size & (size - 1):
        raise UsageError("HT314.no-power-of-two", ranks=size, fewer=1 << size.bit_length() - 1)
    if settings.loss_scaled:
        raise UsageError("HT313.adasum")
    if over != "mpi" and size > 1:
        raise UsageError("HT314.adasum-over-gloo", world=world)
