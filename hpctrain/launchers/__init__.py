"""Who started me? One file for each launcher, and the table that orders them."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain import allocation, variables
from hpctrain.allocation import Allocation
from hpctrain.errors import ContradictionError, HpctrainError, UsageError
from hpctrain.launchers.base import Claims, Launcher, MeetingPoint
from hpctrain.launchers.env import ByHand
from hpctrain.launchers.local import HpctrainRun
from hpctrain.launchers.none import NoLauncher
from hpctrain.launchers.slurm import SlurmStep
from hpctrain.launchers.torchrun import Torchrun
from hpctrain.world import World

__all__ = ["LAUNCHERS", "Explanation", "MeetingPoint", "Start", "detect", "explain", "survey"]

# The first one that recognises the environment has the word; each `reason` says why it stands
# where it does.
LAUNCHERS: tuple[Launcher, ...] = (
    HpctrainRun(),
    Torchrun(),
    SlurmStep(),
    ByHand(),
    NoLauncher(),
)


@dataclass(frozen=True, slots=True)
class Start:
    """All that the environment says about the start of this process."""

    world: World
    claims: Claims
    meeting_point: MeetingPoint
    allocation: Allocation | None
    outer: tuple[Launcher, ...]
    warnings: tuple[str, ...]


def detect(env: Mapping[str, str] | None = None) -> World:
    """Who this process is, from `os.environ` or the environment given.

    Raises:
        ContradictionError: the environment is partial or contradicts itself.
        UsageError: $HPCTRAIN_LAUNCHER names no launcher.
    """
    return survey(env).world


def survey(env: Mapping[str, str] | None = None) -> Start:
    """Everything that the environment says; raises what `detect` raises."""
    if env is None:
        env = os.environ
    launcher = _choose(env)
    world = launcher.world(env)
    others = [
        other
        for other in LAUNCHERS
        if other is not launcher and other.name != "none" and other.matches(env)
    ]
    for other in others:
        if other.name not in launcher.inside:
            _compare(launcher, other, env)
    job = allocation.detect(env)
    return Start(
        world=world,
        claims=launcher.claims(env),
        meeting_point=launcher.meeting_point(env, world),
        allocation=job,
        outer=tuple(others),
        warnings=tuple(_warnings(world, job)),
    )


def _choose(env: Mapping[str, str]) -> Launcher:
    """The launcher that a person named, else the first of the table that matches."""
    wanted = env.get(variables.LAUNCHER)
    if wanted:
        for launcher in LAUNCHERS:
            if launcher.name == wanted:
                return launcher
        names = ", ".join(launcher.name for launcher in LAUNCHERS)
        raise UsageError(
            f"{variables.LAUNCHER}={wanted}", f"one of {names}", f"unset {variables.LAUNCHER}"
        )
    return next(launcher for launcher in LAUNCHERS if launcher.matches(env))


def _compare(launcher: Launcher, other: Launcher, env: Mapping[str, str]) -> None:
    """Refuse two launchers that neither started the other and disagree on who this is."""
    if env.get(variables.LAUNCHER):
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
                f"unset {' '.join(unwanted)}    or: export {variables.LAUNCHER}={other.name}",
            )


def _warnings(world: World, job: Allocation | None) -> list[str]:
    if world.launcher == "none" and job and job.tasks and job.tasks > 1:
        return [
            f"this process trains alone, and {job.tasks - 1} of the {job.tasks} tasks of job "
            f"{job.job_id} are idle: put srun before the command"
        ]
    return []


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `hpctrain explain` shows: the start, or the error that there is none."""

    start: Start | None
    error: HpctrainError | None

    def as_json(self) -> dict[str, Any]:
        """The keys that `hpctrain explain --json` promises; what is not known is None."""
        start = self.start
        world, job = (start.world, start.allocation) if start else (None, None)
        point = start.meeting_point if start else None
        fields = [field.name for field in dataclasses.fields(World)]
        return {
            **{field: getattr(world, field, None) for field in fields},
            "main_address": point.address if point else None,
            "main_port": point.port if point else None,
            "job_id": job.label if job else None,
            "restart_count": job.restart_count if job else None,
            "sources": {f: c.source for f, c in start.claims.items()} if start else {},
            "warnings": list(start.warnings) if start else [],
        }


def explain(env: Mapping[str, str] | None = None) -> Explanation:
    """What the launcher said, and why; an environment that contradicts itself is an answer too."""
    try:
        return Explanation(survey(env), None)
    except HpctrainError as error:
        return Explanation(None, error)
