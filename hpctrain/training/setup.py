"""Setup before training: from the options and the launcher's variables to connected ranks."""

import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctrain import backends, precision, rendezvous
from hpctrain.arguments import Batches, Options, plan_batches
from hpctrain.cluster import env_vars, launchers, visible_gpus
from hpctrain.cluster.texts import first_line
from hpctrain.errors import HpctrainError, StartError, UsageError
from hpctrain.process import device, file_limit
from hpctrain.process.determinism import choose_algorithms
from hpctrain.process.logging import logger, warn
from hpctrain.process.threads import Threads, divide
from hpctrain.rendezvous import consistency
from hpctrain.training import known_numbers, monitor, prepare
from hpctrain.training.context import Context
from hpctrain.training.preemption import Preemption

__all__ = ["open_ranks"]

# After a hang, the watchdog can name the rank to blame, but a collective that times out cannot. So
# the collective times out later, with time to spare: the watchdog may be late, as it does not count
# time in which it could not run.
_SECONDS_TO_BLAME = 10.0


def open_ranks(
    start: launchers.Start,
    options: Options,
    own_options: Mapping[str, Any],
    preemption: Preemption,
    exit_status_file: str | None,
    env: MutableMapping[str, str],
    undo: ExitStack,
) -> Context:
    """Connect this rank to the others.

    Args:
        start: start of this process, read from the launcher's variables.
        options, own_options, preemption, exit_status_file: as in `Context`.
        env: environment variables of this process; one of them selects a slice of a GPU, until
            `undo` restores it.
        undo: receives the callbacks that restore the process.

    Raises:
        UsageError: wrong options, or an environment that contradicts itself.
        StartError: not all ranks connected.
    """
    if start.stray:
        raise start.stray
    world = start.world
    batches = plan_batches(options, world.world_size)
    name = backends.choose(options.backend, world.world_size)
    own = options.of_backend(name)
    for group, given in options.ignored(name).items():
        logger.info("--%s %s: ignored, as the backend is %s", group, given, name)
    threads = Threads.here(env)
    undo.callback(threads.put_back)
    # An error is sent to all ranks, so that none of them waits for this one.
    failure: HpctrainError | None = None
    entry: dict[str, Any] = {}
    try:
        chosen, numbers, settings, entry = _equip(start, options, batches, name, own, env, undo)
    except (UsageError, StartError) as error:
        failure = error
    begun = time.time()
    met = rendezvous.meet(
        world,
        start.rendezvous_point,
        {**entry, **threads.entry()},
        options.start_timeout,
        logger.info if world.rank == 0 else logger.warning,
        start.waste or failure,
        check=partial(_check, start, name, options.workers),
        store=backends.agent_store(start.rendezvous_point, options.start_timeout),
        folder=Path(options.run_dir or env.get(env_vars.RUN_DIR) or "runs"),
    )
    # After a failure, the rendezvous has raised it.
    workers = threads.fit(met.own, options.workers)
    choose_algorithms(options.deterministic, chosen, undo)
    numbers.switch(undo)
    backend = backends.open_backend(name, met, chosen, settings)
    known_numbers.check(backend, met.roster)
    connected = time.time()
    preemption.opened()
    return Context(
        options=options,
        own_options=own_options,
        allocation=start.allocation,
        preemption=preemption,
        exit_status_file=exit_status_file,
        world=met.world,
        roster=met.roster,
        batches=batches,
        device=chosen,
        precision=numbers,
        backend=backend,
        opened=(begun, connected),
        workers=workers,
        placement=prepare.place_batches(options, numbers),
    )


def _equip(
    start: launchers.Start,
    options: Options,
    batches: Batches,
    backend: str,
    own: dict[str, Any],
    env: MutableMapping[str, str],
    undo: ExitStack,
) -> tuple[torch.device, precision.Precision, backends.BackendSettings, dict[str, Any]]:
    """Choose the device of this rank, and check what it has to work with.

    Args:
        start, options, env, undo: as for `open_ranks`.
        batches: global batch size, micro-batch size and accumulation.
        backend, own: name and own options of the backend.

    Returns:
        Device, precision, settings of the backend, and what rank 0 compares of all ranks.

    Raises:
        UsageError: something is missing on this host, or the settings contradict each other.
        StartError: the GPU does not work.
    """
    world = start.world
    try:
        device.check_torch(str(torch.__version__), os.path.dirname(torch.__file__))
        undo.callback(file_limit.make_room(world.world_size))
        slices = device.take_slice(world, env, undo)
        chosen = device.choose(world, start.allocation, env, options.device)
        first = world.rank == 0 and options.device == "auto"
        if first and chosen.type == "cpu" and (unused := device.passed_over(env)):
            warn(unused)
        gpus = max(slices, torch.cuda.device_count()) if chosen.type == "cuda" else 0
        numbers = precision.open_precision(
            options.precision,
            chosen,
            precision.PrecisionSettings(
                options.loss_scale, options.keep_batchnorm_fp32, world.world_size
            ),
        )
        prepare.check_compiler(options, chosen)
        monitor.check(options, world.rank)
        settings = backends.BackendSettings(
            options.timeout + _SECONDS_TO_BLAME,
            options.start_timeout,
            batches.accumulate,
            options.deterministic,
            numbers.requires_synced_skip,
            numbers.name,
            own,
        )
        backends.check(backend, world, chosen, settings)
        # With --precision auto, different GPUs may give different precisions.
        deciding = {**options.deciding(), "--precision": numbers.name}
        entry = {**consistency.entry(chosen, deciding), "visible_gpus": gpus}
        return chosen, numbers, settings, entry
    except RuntimeError as failure:  # from CUDA
        raise StartError("HT615.gpu-unusable", reason=first_line(failure)) from None


def _check(
    start: launchers.Start, backend: str, workers: int | str, roster: rendezvous.Roster
) -> rendezvous.Answer:
    """Compare all ranks, and return the number of cores of each; called by rank 0."""
    consistency.check(roster.entries, roster.host_names)
    if backend != "dataparallel":  # which uses all GPUs that its process sees
        gpus = [0] * len(roster.hosts)
        for entry, node in zip(roster.entries, roster.host_of_rank, strict=True):
            gpus[node] = max(gpus[node], entry["visible_gpus"])
        nodes = dict(zip(roster.hosts, zip(roster.ranks_per_host, gpus, strict=True), strict=True))
        if idle := visible_gpus.idle(start.world.launcher, start.allocation, nodes):
            warn(idle)
    return rendezvous.Answer(own=divide(roster.entries, roster.host_of_rank, workers))
