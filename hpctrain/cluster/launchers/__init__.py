"""Who started me? One file for each launcher, and the table that orders them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster import env_vars
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.launchers import checks
from hpctrain.cluster.launchers.ancestors import Process
from hpctrain.cluster.launchers.base import (
    LONGEST_TIMEOUT,
    Claims,
    Environ,
    Launcher,
    RendezvousPoint,
)
from hpctrain.cluster.launchers.env import EnvLauncher
from hpctrain.cluster.launchers.flux import Flux
from hpctrain.cluster.launchers.horovodrun import Horovodrun
from hpctrain.cluster.launchers.hpctrain_run import HpctrainRun
from hpctrain.cluster.launchers.jsrun import Jsrun
from hpctrain.cluster.launchers.mpich import Hydra
from hpctrain.cluster.launchers.mvapich import MVAPICH2
from hpctrain.cluster.launchers.none import NoLauncher
from hpctrain.cluster.launchers.openmpi import OpenMPI
from hpctrain.cluster.launchers.pals import PALS
from hpctrain.cluster.launchers.pmi import Prterun, UnknownPMI
from hpctrain.cluster.launchers.slurm import SlurmStep
from hpctrain.cluster.launchers.submitit import SubmititLocal
from hpctrain.cluster.launchers.torchrun import Torchrun
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError, UsageError

__all__ = [
    "LAUNCHERS",
    "LONGEST_TIMEOUT",
    "Process",
    "Reading",
    "RendezvousPoint",
    "Start",
    "detect",
    "readings",
    "survey",
]

# The nearest first: the first one that recognises the environment has the word. Each `reason` says
# why it stands where it does.
LAUNCHERS: tuple[Launcher, ...] = (
    HpctrainRun(),
    Torchrun(),
    Horovodrun(),
    Jsrun(),
    OpenMPI(),
    MVAPICH2(),
    Hydra(),
    Flux(),
    SubmititLocal(),
    Prterun(),
    SlurmStep(),
    PALS(),
    EnvLauncher(),
    UnknownPMI(),
    NoLauncher(),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A variable that holds a value of the world.

    Attributes:
        variable, value: as found.
        field: of World.
        launcher: whose variable it is.
        lost: why it did not count; "" for one that did.
    """

    variable: str
    value: str
    field: str
    launcher: str
    lost: str


@dataclass(frozen=True, slots=True)
class Start:
    """All that is known about the start of this process.

    Attributes:
        world: who it is, as the launcher has it.
        launcher: whose word counts.
        claims: the variable that each value came from.
        rendezvous_point: where the ranks find each other.
        allocation: the scheduler's job, or None.
        stray: why this process is no rank of its own, so that it may not train; or None.
        overruled: a person took this process out of the start that its environment speaks of.
        waste: what would lie idle if it trained, and how to say that this is meant; or None.
    """

    world: World
    launcher: Launcher
    claims: Claims
    rendezvous_point: RendezvousPoint
    allocation: Allocation | None
    stray: UsageError | None = None
    waste: UsageError | None = None
    overruled: bool = False


def detect(env: Mapping[str, str] | None = None) -> World:
    """Who this process is, from `os.environ` or the environment given.

    Raises:
        ContradictionError: the environment is partial or contradicts itself.
        UsageError: $HPCTRAIN_LAUNCHER names no launcher.
    """
    return survey(env).world


def survey(env: Mapping[str, str] | None = None, process: Process | None = None) -> Start:
    """Everything that is known about the start of a process.

    Args:
        env: its environment (default: this process's own).
        process: its other facts (default: this process's own, or none with an `env`).

    Raises:
        ContradictionError, UsageError: as in `detect`.
    """
    if process is None:
        process = Process.current() if env is None else Process()
    env = {**(os.environ if env is None else env), **process.facts()}
    launcher = _choose(env)
    world = launcher.world(env)
    others = _others(launcher, env)
    for other in others:
        if other.name not in launcher.inside:
            _compare(launcher, other, env)
    claims, job = launcher.claims(env), detect_job(env)
    meant = bool(env.get(env_vars.LAUNCHER))
    point = launcher.rendezvous_point(env, world)
    names = [other.name for other in others]
    return Start(
        world=world,
        launcher=launcher,
        claims=claims,
        rendezvous_point=point,
        allocation=job,
        overruled=meant and launcher.name == "none" and bool(others),
        stray=checks.nameless(world, point)
        or checks.reset(world, env, process)
        or (None if meant else checks.child(claims, env, process))
        or (None if meant else checks.stale(launcher.name, names, process))
        or (None if meant else checks.dropped(world, job, process)),
        waste=None if meant else checks.idle(world, job, _in_step(others, env), process),
    )


def _choose(env: Environ) -> Launcher:
    """The launcher that a person named, else the first of the table that matches."""
    wanted = env.get(env_vars.LAUNCHER)
    if wanted:
        for launcher in LAUNCHERS:
            if launcher.name == wanted:
                return launcher
        names = ", ".join(launcher.name for launcher in LAUNCHERS)
        raise UsageError(
            f"{env_vars.LAUNCHER}={wanted!r}", f"one of {names}", f"unset {env_vars.LAUNCHER}"
        )
    return next(launcher for launcher in LAUNCHERS if launcher.matches(env))


def _others(launcher: Launcher, env: Environ) -> list[Launcher]:
    """The launchers whose variables are there as well."""
    return [
        other
        for other in LAUNCHERS
        if other is not launcher and other.name != "none" and other.matches(env)
    ]


def _compare(launcher: Launcher, other: Launcher, env: Environ) -> None:
    """Refuse two launchers that neither started the other and disagree on who this is."""
    if env.get(env_vars.LAUNCHER):
        return
    ours, theirs = launcher.claims(env), other.claims(env)
    for field in ("rank", "world_size", "local_rank"):
        if field in ours and field in theirs and ours[field].value != theirs[field].value:
            unwanted = sorted(
                {c.source for c in theirs.values()} - {c.source for c in ours.values()}
            )
            raise ContradictionError(
                f"{ours[field].source}={ours[field].value} ({launcher.name}) and "
                f"{theirs[field].source}={theirs[field].value} ({other.name})",
                f"one {field.replace('_', ' ')}",
                f"unset {' '.join(unwanted)}    or: env {env_vars.LAUNCHER}="
                f"{other.name if _speaks(other, env) else launcher.name} COMMAND",
            )


def _in_step(others: Sequence[Launcher], env: Environ) -> bool:
    """Whether each task of a step does the same; `srun --pty` gives a person a shell of one."""
    return any(one.name == "slurm" for one in others) and not env.get("SLURM_PTY_PORT")


def _speaks(launcher: Launcher, env: Environ) -> bool:
    """Whether it could have the word."""
    try:
        launcher.rendezvous_point(env, launcher.world(env))
    except UsageError:
        return False
    return True


def readings(env: Environ) -> Iterator[Reading]:
    """All variables that hold a value of the world, and which of them count; raises nothing."""
    try:
        chosen = _choose(env)
    except UsageError:
        chosen = LAUNCHERS[-1]
    counted: dict[str, str] = {}  # by field, the variable that counts
    taken: set[str] = set()
    # Several launchers set PMI's: what is there belongs to one that is recognised.
    others = sorted(LAUNCHERS, key=lambda one: (one is not chosen, not one.matches(env)))
    for launcher, field, name in ((one, *pair) for one in others for pair in one.readable()):
        if not env.get(name) or name in taken:
            continue
        taken.add(name)
        if launcher is chosen and field not in counted:
            counted[field], lost = name, ""
        elif field in counted and env[name] == env[counted[field]]:
            lost = f"says the same as {counted[field]}"
        elif launcher is chosen:
            lost = f"{counted[field]} is nearer"
        else:
            lost = _why(chosen, launcher, env)
        yield Reading(name, env[name], field, launcher.name, lost)


def _why(chosen: Launcher, other: Launcher, env: Environ) -> str:
    if not other.matches(env):
        return f"no {other.recognised_by}"
    if other.name in chosen.inside:
        return f"speaks of the process in which {chosen.name} was started"
    if env.get(env_vars.LAUNCHER):
        return f"{env_vars.LAUNCHER}={chosen.name}"
    return f"{chosen.name} comes first, and they have to agree"
