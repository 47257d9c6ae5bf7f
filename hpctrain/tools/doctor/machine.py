"""Checks of this machine and this process, made before the rendezvous."""

import platform
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers import Start
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.rendezvous import interfaces
from hpctrain.tools.doctor import devices, limits, software, storage
from hpctrain.tools.doctor.findings import OK, WARNING, Finding

if TYPE_CHECKING:
    import torch

__all__ = ["Machine", "examine", "network", "shown_variables"]

# Environment variables that the report shows. An unknown one may hold a password.
_SHOWN = (
    *env_vars.OF_THE_JOB,
    *env_vars.WORLD,
    env_vars.LAUNCHER, env_vars.HOSTNAME, env_vars.INTERFACE,
    env_vars.MAIN_ADDRESS, env_vars.MAIN_PORT,
    env_vars.RUN_DIR, env_vars.DATA, env_vars.CACHE, env_vars.LEAST_TIMEOUT,
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "MKL_NUM_THREADS",
    "SLURM_CPUS_PER_TASK", "SLURM_JOB_PARTITION", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID",
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """Findings and facts of a rank about its own machine.

    Attributes:
        findings: findings in the order in which they are shown.
        torch_version: version of torch; None where torch cannot be imported.
        device: device of this rank; None where it can have none.
        facts: host, system, launcher, and the variables that may be shown; JSON values.
    """

    findings: list[Finding]
    torch_version: str | None
    device: "torch.device | None"
    facts: dict[str, Any]


def examine(start: Start, run: Path, env: MutableMapping[str, str], undo: ExitStack) -> Machine:
    """Check this machine and this process.

    Only the first rank of each host checks what all ranks of the host share.

    Args:
        start: start of this process.
        run: run directory.
        env: environment variables; may be changed.
        undo: stack that receives callbacks to restore `env` and the limits of this process.
    """
    world = start.world
    module, about_torch = software.import_torch()
    # Choose the device before other code starts CUDA.
    device, about_gpus = devices.examine(module, start, env, undo)
    found = [software.python(), about_torch, *about_gpus]
    if world.local_rank == 0:
        if module is not None:  # or Horovod fails for the same reason
            found.append(software.horovod())
        found += [software.slurm(), storage.examine(run)]
        found.append(network(start.rendezvous_point.interface))
    found += limits.examine(env, world, undo)
    if start.waste is not None:
        found.append(Finding.of("start", start.waste, WARNING))
    facts = {
        "host": start.rendezvous_point.host,
        "system": platform.platform(),
        "launcher": world.launcher,
        "environment": shown_variables(env),
    }
    version = str(module.__version__) if module is not None else None
    return Machine([replace(one, ranks=(world.rank,)) for one in found], version, device, facts)


def network(chosen: str | None) -> Finding:
    """Return a finding with the network interfaces; the ranks use the first one that connects them.

    Args:
        chosen: interface from the environment; None without one.
    """
    if chosen is not None:
        try:
            return Finding("network", OK, f"{chosen} {interfaces.address_on(chosen)}, as set")
        except UsageError as error:
            return Finding.of("network", error)
    own = [f"{interfaces.interface_of(one)} {one}" for one in interfaces.reachable()]
    return Finding("network", OK, ", ".join(own) or "loopback only: no other host can be reached")


def shown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the report may show, by name.

    These are the names of a fixed list, and the settings of the network libraries whose names do
    not suggest a secret.
    """
    found = {name: env[name] for name in _SHOWN if name in env} | env_vars.of_the_network(env)
    return {name: printable(value) for name, value in sorted(found.items())}
