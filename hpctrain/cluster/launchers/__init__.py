"""Detection of the launcher that started this process: the table of launchers, in order."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpctrain.cluster import entry_points, env_vars
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.launchers import checks, frameworks, mpi
from hpctrain.cluster.launchers.ancestors import Process
from hpctrain.cluster.launchers.base import (
    LONGEST_TIMEOUT,
    SCHEDULERS,
    Claims,
    Environ,
    Launcher,
    RendezvousPoint,
)
from hpctrain.cluster.launchers.slurm import SlurmStep
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
    "installed",
    "readings",
    "survey",
]

# The launcher closest to the ranks comes first. The first one that recognises the environment is
# used. `reason` explains the place of each launcher in this table.
LAUNCHERS: tuple[Launcher, ...] = (
    frameworks.HpctrainRun(),
    frameworks.Torchrun(),
    frameworks.Horovodrun(),
    mpi.Jsrun(),
    mpi.OpenMPI(),
    mpi.MVAPICH2(),
    mpi.Hydra(),
    mpi.Flux(),
    frameworks.SubmititLocal(),
    mpi.Prterun(),
    SlurmStep(),
    mpi.PALS(),
    frameworks.EnvLauncher(),
    mpi.UnknownPMI(),
    frameworks.NoLauncher(),
)


def installed() -> tuple[Launcher, ...]:
    """Return the launchers in the order in which they are asked, with those of other packages.

    Raises:
        UsageError: an entry point of another package cannot be used.
    """
    table = list(LAUNCHERS)
    names = [launcher.name for launcher in table]
    for kind in entry_points.load(entry_points.LAUNCHERS, Launcher, names).values():
        if kind.before not in names:
            raise UsageError("HT119.unknown-place", launcher=kind, names=", ".join(names))
        place = next(n for n, launcher in enumerate(table) if launcher.name == kind.before)
        table.insert(place, kind())
    return tuple(table)


@dataclass(frozen=True, slots=True)
class Reading:
    """A variable that holds the value of a field of `World`.

    Attributes:
        variable, value: name and value of the variable.
        field: field of World.
        launcher: launcher that the variable belongs to.
        reason: why the variable was ignored; "" if it was used.
    """

    variable: str
    value: str
    field: str
    launcher: str
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """All facts about the start of this process.

    Attributes:
        world: rank, world size and host of this process, from the launcher's variables.
        launcher: launcher whose variables are used.
        claims: value of each field, with the variable that it came from.
        rendezvous_point: address, port and key with which the ranks find each other.
        allocation: job of the scheduler, or None.
        stray: error if this process is not a separate rank and must not train; else None.
        overruled: whether the user set $HPCTRAIN_LAUNCHER=none although another launcher was
            found.
        waste: error if training would leave tasks or hosts of the job idle or repeat the same
            training, with the command that allows it; else None.
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
    """Return the place of this process among the ranks, from `os.environ` or from `env`.

    Raises:
        ContradictionError: the environment is incomplete or contradicts itself.
        UsageError: $HPCTRAIN_LAUNCHER is not the name of a launcher.
    """
    return survey(env).world


def survey(env: Mapping[str, str] | None = None, process: Process | None = None) -> Start:
    """Return all facts about the start of a process.

    Args:
        env: environment of the process (default: that of this process).
        process: other facts about the process (default: those of this process; none if `env` is
            given).

    Raises:
        ContradictionError, UsageError: see `detect`.
    """
    if process is None:
        process = Process.current() if env is None else Process()
    env = {**process.own(os.environ if env is None else env), **process.facts()}
    launcher = _choose(env)
    world = launcher.world(env)
    others = _others(launcher, env)
    for other in others:
        if not _starts(other, launcher):
            _compare(launcher, other, env)
    job, point = detect_job(env), launcher.rendezvous_point(env, world)
    claims = launcher.claims(env)
    stray = (
        checks.repeated(process)
        or checks.nameless(world, point)
        or checks.reset(world, env, process)
    )
    waste: UsageError | None = None
    named_by_user = bool(env.get(env_vars.LAUNCHER))
    if not named_by_user:
        names = [other.name for other in others]
        stray = (
            stray
            or checks.child(claims, env, process)
            or checks.stale(launcher.name, names, process)
            or checks.dropped(world, job, process)
        )
        # A task of a step, and not an interactive shell of `srun --pty`.
        in_step = "slurm" in names and not env.get(env_vars.PTY_PORT)
        waste = checks.idle(world, job, in_step, process)
        waste = waste or checks.elsewhere(world, job, env, process)
    return Start(
        world=world,
        launcher=launcher,
        claims=claims,
        rendezvous_point=point,
        allocation=job,
        overruled=named_by_user and launcher.name == "none" and bool(others),
        stray=stray,
        waste=waste,
    )


def _choose(env: Environ) -> Launcher:
    """Return the launcher that the user named, else the first in the table that matches."""
    launchers, name = installed(), env.get(env_vars.LAUNCHER)
    for launcher in launchers:
        if launcher.name == name or (not name and launcher.matches(env)):
            return launcher
    names = ", ".join(launcher.name for launcher in launchers)
    raise UsageError("HT103.unknown-launcher", name=name, launchers=names)


def _others(launcher: Launcher, env: Environ) -> list[Launcher]:
    """Return the other launchers whose variables are set."""
    return [
        other
        for other in installed()
        if other.name not in (launcher.name, "none") and other.matches(env)
    ]


def _starts(other: Launcher, launcher: Launcher) -> bool:
    """Check whether a launcher may have started another one, and describes that process.

    A launcher of another package counts as one of the schedulers.
    """
    outside = all(other.name != one.name for one in LAUNCHERS)
    return other.name in launcher.inside or (outside and launcher.inside >= SCHEDULERS)


def _compare(launcher: Launcher, other: Launcher, env: Environ) -> None:
    """Refuse two launchers of which neither started the other, and whose values differ."""
    if env.get(env_vars.LAUNCHER):
        return
    ours, theirs = launcher.claims(env), other.claims(env)
    for field in ("rank", "world_size", "local_rank"):
        if field in ours and field in theirs and ours[field].value != theirs[field].value:
            claims, both = (ours[field], theirs[field]), (launcher, other)
            sources = {c.source for c in theirs.values()} - {c.source for c in ours.values()}
            names = " ".join(sorted(sources))
            usable = other if _is_complete(other, env) else launcher
            raise ContradictionError(
                "HT104.values-differ", claims=claims, launchers=both, names=names, usable=usable
            )


def _is_complete(launcher: Launcher, env: Environ) -> bool:
    """Check whether a launcher's variables are complete and valid."""
    try:
        launcher.rendezvous_point(env, launcher.world(env))
    except UsageError:
        return False
    return True


def readings(env: Environ) -> Iterator[Reading]:
    """Yield all variables that hold a field of `World`, used or not.

    Raises:
        UsageError: as `installed`.
    """
    try:
        chosen = _choose(env)
    except UsageError:
        chosen = LAUNCHERS[-1]
    used: dict[str, str] = {}  # by field, the variable that is used
    assigned: set[str] = set()
    # Several launchers set PMI variables: they are assigned to a launcher that is recognised.
    candidates = sorted(
        installed(), key=lambda one: (one.name != chosen.name, not one.matches(env))
    )
    for launcher, field, name in (
        (candidate, *pair) for candidate in candidates for pair in candidate.readable()
    ):
        if not env.get(name) or name in assigned:
            continue
        assigned.add(name)
        if launcher.name == chosen.name and field not in used:
            used[field], reason = name, ""
        elif field in used and env[name] == env[used[field]]:
            reason = f"same value as {used[field]}"
        elif launcher.name == chosen.name:
            reason = f"{used[field]} has precedence"
        else:
            reason = _reason_ignored(chosen, launcher, env)
        yield Reading(name, env[name], field, launcher.name, reason)


def _reason_ignored(chosen: Launcher, other: Launcher, env: Environ) -> str:
    if not other.matches(env):
        return f"no {other.recognised_by or ' or '.join(other.marks)}"
    if _starts(other, chosen):
        return f"describes the process that started {chosen.name}"
    if env.get(env_vars.LAUNCHER):
        return f"{env_vars.LAUNCHER}={chosen.name}"
    return f"{chosen.name} has precedence, and the values have to agree"
