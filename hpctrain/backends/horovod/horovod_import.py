"""The import of Horovod, and checks of the installed version and the options."""

import importlib
import importlib.util
import inspect
import socket
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from hpctrain.cluster.env_vars import HOSTNAME
from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError

__all__ = ["load", "refuse_options", "refuse_own_name"]

BUILD = "hpctrain horovod build"


def load() -> ModuleType:
    """Return the module `horovod.torch`.

    Raises:
        UsageError: Horovod is not installed, or was built for another torch, or without gloo and
            MPI.
    """
    if importlib.util.find_spec("horovod") is None:
        raise UsageError(
            "HT315",
            "--backend horovod, and Horovod is not installed for this Python",
            f"a Horovod that was built for torch {torch.__version__}",
            f"{BUILD} (it takes some minutes)",
            "--backend ddp (it needs no Horovod)",
        )
    try:
        module = importlib.import_module("horovod.torch")
    except Exception as error:  # a library for another torch may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            "HT315",
            f"--backend horovod, and the installed Horovod cannot be imported: {reason}",
            f"one that was built for torch {torch.__version__}",
            BUILD,
            "--backend ddp",
        ) from None
    if not (module.gloo_built() or module.mpi_built()):
        raise UsageError(
            "HT316",
            "--backend horovod, and the installed Horovod was built without gloo and without MPI",
            "one of them, for the communication between the ranks",
            BUILD,
        )
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
        raise UsageError(
            "HT307",
            f"Horovod as it was released listens at the address of the host's own name, and {name} "
            f"is {address}",
            "an address that the other hosts reach",
            f"{BUILD} (it builds a Horovod without this fault)",
            f"give {name} its address in /etc/hosts",
        )


# Defaults of the options, by the names of DistributedOptimizer.
_DEFAULTS: Mapping[str, Any] = {
    "op": "average",
    "compression": "none",
    "gradient_predivide_factor": 1.0,
    "groups": None,
    "sparse_as_dense": False,
}


def refuse_options(hvd: ModuleType, options: Mapping[str, Any], world_size: int) -> None:
    """Raise an error for options that this version of Horovod does not support.

    Args:
        hvd: `horovod.torch`.
        options: options of the backend, by the names of DistributedOptimizer.
        world_size: number of ranks.

    Raises:
        UsageError: Horovod does not support an option, or would silently ignore it.
    """
    known = inspect.signature(hvd.DistributedOptimizer).parameters
    changed = [name for name, default in _DEFAULTS.items() if options[name] != default]
    for name in changed:
        if name not in known:
            raise UsageError(
                "HT316",
                f"{_flag(name)}, and the installed Horovod has no argument {name}",
                "Horovod 0.28.1",
                BUILD,
            )
    op, predivide = options["op"], options["gradient_predivide_factor"]
    if predivide != 1.0:
        if op != "average":
            raise UsageError(
                "HT311",
                f"{_flag('gradient_predivide_factor')} {predivide:g} with {_flag('op')} {op}",
                "an average, of which a part is divided before the sum",
                f"{_flag('op')} average",
            )
        if options["groups"] is not None:
            raise UsageError(
                "HT311",
                f"{_flag('gradient_predivide_factor')} {predivide:g} with {_flag('groups')} "
                f"{options['groups']}: Horovod reduces groups without it",
                "one of the two",
                f"leave {_flag('groups')} out",
            )
    if op == "adasum":
        for name in ("groups", "sparse_as_dense"):
            if name in changed:
                raise UsageError(
                    "HT311",
                    f"{_flag('op')} adasum with {_flag(name)}",
                    "one of the two: Adasum combines the updates of whole tensors",
                    f"leave {_flag(name)} out",
                )
        if world_size & (world_size - 1):
            raise UsageError(
                "HT314",
                f"{_flag('op')} adasum with {world_size} ranks",
                "2, 4, 8, … ranks: Adasum goes up a binary tree",
                f"{1 << world_size.bit_length() - 1} ranks",
                f"{_flag('op')} average",
            )


def _flag(name: str) -> str:
    return "--horovod-" + name.replace("_", "-")
