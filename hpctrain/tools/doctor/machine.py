"""Checks of this machine and this process, made before the rendezvous."""

import os
import platform
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster import visible_gpus
from hpctrain.cluster.launchers import Start
from hpctrain.errors import UsageError
from hpctrain.process import file_limit
from hpctrain.tools.doctor import (
    devices,
    limits,
    network,
    scheduler,
    shown_variables,
    software,
    storage,
)
from hpctrain.tools.doctor.findings import WARNING, Finding, of_rank

if TYPE_CHECKING:
    import torch

__all__ = ["Machine", "examine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Findings and facts of a rank about its own machine.

    Attributes:
        findings: findings in the order in which they are shown.
        torch_version: version of torch; None where torch cannot be imported.
        device: device of this rank; None where it can have none.
        cores: number of cores that this process may run on.
        facts: host, system, launcher, and the variables that may be shown; JSON values.
    """

    findings: list[Finding]
    torch_version: str | None
    device: "torch.device | None"
    cores: int
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
    world, job = start.world, start.allocation
    of_host = world.local_rank == 0
    module, about_torch = software.import_torch()
    found = [software.python(), about_torch]
    # Choose the device before other code starts CUDA.
    device, refused = devices.choose(start, env, undo) if module else (None, None)
    found += devices.examine(module, visible_gpus.visible(env), job.gpus if job else None, refused)
    if of_host:
        found += [software.horovod(), software.submitit()]
    found += scheduler.examine(job, env, world)
    found += limits.examine(env, world.world_size, of_host)
    if of_host:
        found += storage.examine("run directory", run)
        found += storage.examine("cache", storage.cache(env))
        found += storage.quotas([run, storage.cache(env)])
        found += network.examine()
    with suppress(UsageError):  # the finding about open files reports it
        undo.callback(file_limit.make_room(world.world_size))
    if start.waste is not None:
        found.append(Finding("start", WARNING, start.waste.found, start.waste.fixes))
    facts = {
        "host": start.rendezvous_point.host,
        "system": platform.platform(),
        "launcher": world.launcher,
        "environment": shown_variables.shown(env),
    }
    version = str(module.__version__) if module is not None else None
    cores = len(os.sched_getaffinity(0))
    return Machine(of_rank(found, world.rank), version, device, cores, facts)
