"""The import of Horovod, and checks of the installed version and the options."""

import importlib
import importlib.util
import socket
from collections.abc import Mapping
from types import ModuleType
from typing import Any

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
        raise UsageError(
            "HT315",
            f"--backend horovod, and the installed Horovod cannot be imported: {first_line(error)}",
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


def refuse_start(hvd: ModuleType, world: World, over: str, mpi_was_used: bool) -> None:
    """Raise an error if Horovod cannot start in this process.

    Args:
        hvd: `horovod.torch`.
        world: place of this rank.
        over: library over which the ranks coordinate, "gloo" or "mpi".
        mpi_was_used: whether this process had a session over Horovod and MPI.
    """
    _refuse(
        (
            hvd.is_initialized(),
            "HT308",
            "Horovod is initialized already",
            "the Session initializes it",
            "remove the script's own hvd.init()",
            "close the earlier Session first",
        ),
        (
            over == "mpi" and not hvd.mpi_built(),
            "HT316",
            "HOROVOD_CONTROLLER=mpi, and the installed Horovod was built without MPI",
            "gloo, which needs nothing, or a Horovod with MPI",
            "unset HOROVOD_CONTROLLER",
            "hpctrain horovod build --mpi",
        ),
        (
            over == "mpi" and mpi_was_used,
            "HT308",
            "a second Session over Horovod and MPI in one process",
            "one, as MPI starts once in a process",
            "export HOROVOD_CONTROLLER=gloo",
        ),
        (
            over == "gloo" and not hvd.gloo_built(),
            "HT316",
            f"--backend horovod under {world.launcher}, and the installed Horovod has no gloo",
            "gloo, or a start by mpirun",
            BUILD,
        ),
    )


def refuse_options(settings: BackendSettings, over: str, world: World) -> None:
    """Raise an error for options that do not work together, or that Horovod would ignore."""
    own, size = settings.own, world.world_size
    op, predivide, groups = own["op"], own["gradient_predivide_factor"], own["groups"]
    divided = f"--horovod gradient-predivide-factor={predivide:g} with "
    adasum = op == "adasum"
    other = next((n for n in ("groups", "sparse_as_dense") if own[n] not in (None, False)), "")
    setting = other.replace("_", "-")
    _refuse(
        (
            predivide != 1.0 and op != "average",
            "HT311",
            f"{divided}op={op}",
            "an average, of which a part is divided before the sum",
            "--horovod op=average",
        ),
        (
            predivide != 1.0 and groups is not None,
            "HT311",
            f"{divided}groups={groups}: Horovod reduces groups without it",
            "one of the two",
            "remove groups from --horovod",
        ),
        (
            adasum and other,
            "HT311",
            f"--horovod op=adasum with {setting}",
            "one of the two: Adasum combines the updates of whole tensors",
            f"remove {setting} from --horovod",
        ),
        (
            adasum and size & (size - 1),
            "HT314",
            f"--horovod op=adasum with {size} ranks",
            "2, 4, 8, … ranks: Adasum goes up a binary tree",
            f"{1 << size.bit_length() - 1} ranks",
            "--horovod op=average",
        ),
        (
            adasum and settings.loss_scaled,
            "HT313",
            "--horovod op=adasum with --precision fp16",
            "a precision without a loss scale: each rank takes its step before the updates are "
            "combined, and those of an overflow must not be",
            "--precision bf16",
        ),
        (
            adasum and over != "mpi" and size > 1,
            "HT314",
            f"--horovod op=adasum over gloo, under {world.launcher}",
            "MPI, without which Horovod has no Adasum",
            "mpirun -np N python SCRIPT (after hpctrain horovod build --mpi)",
            "--horovod op=average",
        ),
    )


def _refuse(*cases: tuple[Any, ...]) -> None:
    """Raise the error of the first case that is true."""
    for wrong, code, found, expected, *fixes in cases:
        if wrong:
            raise UsageError(code, found, expected, *fixes)
