"""Decision which rank is to blame, from the observations of all helpers; pure functions."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.cluster.texts import listed, ranks_text
from hpctrain.errors import HpctrainError
from hpctrain.process.phases import AGREEING, BACKWARD, CLOSED, LOADING, PHASES, UPDATING, WAITING

__all__ = [
    "Blame",
    "Sighting",
    "apart",
    "describe",
    "hung",
    "judge",
    "place",
    "suspended",
    "without_worker",
]

# State letters of a process. Source: proc(5).
STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel",
    "T": "is stopped",
    "t": "is held by a debugger",
}
_MOST_NAMED = 8
_STOPPED = ("T", "t")
# Here a rank waits for the others and runs nothing of the script but hooks. It may use a whole
# processor for it, as NCCL and MPI do.
_EXCHANGES = (BACKWARD, UPDATING, AGREEING, WAITING)


@dataclass(slots=True)
class Sighting:
    """Observation of a rank by the helper of its host.

    Attributes:
        rank: number of the rank.
        host: host of the rank.
        step: optimizer steps done by the rank.
        phase: current phase, one of `PHASES`.
        silence: seconds since the last heartbeat.
        pid: process id of the rank.
        state: state letter of the process in proc(5); empty if the process has ended.
        waits_in: kernel function in which the process waits; empty if it does not wait there.
        limit: seconds that the rank may be silent in this phase.
        slowest: longest silence in this phase of late, from which the limit was learnt; None for
            `--timeout`.
        still: "idle" if its stack stays the same and it computes nothing, "busy" if its stack stays
            the same; empty otherwise.
        frame: innermost frame of its main thread; empty if it is not known.
        worker: process id of a worker that has not run since this rank forked it; 0 if there is
            none.
    """

    rank: int
    host: str
    step: int
    phase: int
    silence: float
    pid: int
    state: str
    waits_in: str = ""
    limit: float = math.inf
    slowest: float | None = None
    still: str = ""
    frame: str = ""
    worker: int = 0

    @property
    def inside(self) -> bool:
        """Whether the rank is alive and has not left the run."""
        return bool(self.state) and self.phase != CLOSED

    @property
    def position(self) -> tuple[int, int]:
        """Step and phase; the rank with the least of all ranks is behind the others."""
        return self.step, self.phase


@dataclass(frozen=True, slots=True)
class Blame:
    """Diagnosis of a hang, for the error message.

    Attributes:
        ranks: suspected ranks; empty if all ranks wait for each other.
        key: key of the message.
        values: values of its placeholders.
        longer: option or variable that allows more time; empty if more time does not help.
        limit: timeout in seconds.
        slowest: longest recent silence from which it was computed; None for `--timeout`.
    """

    ranks: tuple[int, ...]
    key: str
    values: Mapping[str, object]
    longer: str = ""
    limit: float = 0.0
    slowest: float | None = None

    def error(self, limit: str) -> HpctrainError:
        """Return the error.

        Args:
            limit: description of the timeout.
        """
        longer = [f"{self.longer}, if this place may take so long"] if self.longer else []
        return HpctrainError(self.key, **self.values, limit=limit, longer=longer)


def suspended(sightings: Sequence[Sighting], world_size: int) -> bool:
    """Return whether every rank is stopped: then the run was suspended and nothing hangs."""
    stopped = [sighting for sighting in sightings if sighting.state in _STOPPED]
    return len(stopped) == len(sightings) == world_size


def judge(sightings: Sequence[Sighting], world_size: int, hosts: Sequence[str]) -> Blame:
    """Decide which ranks are to blame.

    In this order: ranks that are gone; ranks that are stopped; ranks that are behind the others;
    ranks that wait in the kernel; ranks without observation, or that have left, while the others
    wait.

    Args:
        sightings: observations of ranks; at least one rank is silent.
        world_size: number of ranks.
        hosts: names of all hosts.
    """
    sightings = sorted(sightings, key=lambda sighting: sighting.rank)
    left = [sighting for sighting in sightings if sighting.phase == CLOSED]
    alive = [sighting for sighting in sightings if sighting.inside]
    if gone := [one for one in sightings if not one.state and one.phase != CLOSED]:
        return _gone(gone, alive)
    if stopped := [sighting for sighting in alive if sighting.state in _STOPPED]:
        return _stopped(stopped)
    last = min(sighting.position for sighting in alive)
    behind = [sighting for sighting in alive if sighting.position == last]
    if len(behind) == len(alive):
        behind = _unlike_the_others(alive) or behind
    waits = behind[0].phase >= AGREEING
    missing = sorted(set(range(world_size)) - {sighting.rank for sighting in sightings})
    absent = [host for host in hosts if host not in {sighting.host for sighting in sightings}]
    unobserved = _without_observation(missing, absent)
    if len(behind) < len(alive) or world_size == 1 or ((missing or left) and not waits):
        values = {**_silent(behind), "kernel": _kernel(behind), "unobserved": unobserved}
        return Blame(_ranks(behind), "HT659.rank-silent", values, _TIMEOUT)
    if missing:
        values = {**_silent(alive), "unobserved": unobserved}
        return Blame(tuple(missing), "HT660.ranks-unobserved", values)
    if left:
        return Blame(_ranks(left), "HT661.ranks-left", {**_silent(alive), "left": _names(left)})
    values = {**_silent(alive), "number": len(alive), "kernel": _kernel(alive)}
    key, longer = ("HT660.all-wait", "") if waits else ("HT659.all-silent", _TIMEOUT)
    return Blame((), key, values, longer)


def _unlike_the_others(alive: Sequence[Sighting]) -> list[Sighting]:
    """Return the ranks that hang where all ranks are in the same phase; none if it is not known.

    These wait in the kernel; or one rank executes something else, which all other ranks wait for in
    the same function. In which phases they may wait depends on the backend: the ranks of fsdp
    gather weights in the forward pass. For data no rank waits for another one.
    """
    in_kernel = [sighting for sighting in alive if sighting.state == "D"]
    if in_kernel:
        return in_kernel if len(in_kernel) < len(alive) else []
    frames = Counter(sighting.frame for sighting in alive)
    alone = [sighting for sighting in alive if frames[sighting.frame] == 1]
    # A rank may not have shown its stack yet.
    known = len(frames) == 2 and len(alone) == 1 and "" not in frames
    return alone if known and alive[0].phase != LOADING else []


def hung(
    sightings: Sequence[Sighting], world_size: int, hosts: Sequence[str], soon: float
) -> Blame | None:
    """Return the blame if the run hangs for longer than the learnt time-outs; None otherwise.

    Every rank has to be silent, and the silence of every rank has to be explained: by its own
    samples, or by a rank that is behind it, if it waits in an exchange for that one. A stopped rank
    explains the silence of all others.

    Args:
        sightings: observations of all ranks.
        world_size: number of ranks.
        hosts: names of all hosts.
        soon: seconds until the end of the time-out that may be missing.
    """
    inside = [sighting for sighting in sightings if sighting.inside]
    if not inside or len(sightings) < world_size or suspended(sightings, world_size):
        return None
    blame = judge(sightings, world_size, hosts)
    named = [sighting for sighting in inside if sighting.rank in blame.ranks]
    hanging = [one for one in inside if not named or one in named or one.phase not in _EXCHANGES]
    if named and all(one.state == "T" for one in named):
        hanging = named
    longest = max(hanging, key=lambda sighting: sighting.limit)
    if any(sighting.silence + soon < longest.limit for sighting in inside):
        return None
    for sighting in hanging:
        waits = not named and sighting.phase in _EXCHANGES
        if sighting.still != "idle" and not (waits and sighting.still):
            return None
    longer = "export HPCTRAIN_LEAST_TIMEOUT=SECONDS"
    return replace(blame, longer=longer, limit=longest.limit, slowest=longest.slowest)


def _gone(gone: Sequence[Sighting], alive: Sequence[Sighting]) -> Blame:
    silence = max((sighting.silence for sighting in alive), default=0.0)
    values = {"ranks": _names(gone), "place": place(gone[0]), "silence": silence}
    return Blame(_ranks(gone), "HT657.process-ended", values)


def _stopped(stopped: Sequence[Sighting]) -> Blame:
    pids = " ".join(str(sighting.pid) for sighting in stopped[:_MOST_NAMED])
    state = stopped[0].state
    values = {**_silent(stopped), "pids": pids, "status": STATES[state], "state": state}
    return Blame(_ranks(stopped), "HT658.process-stopped", values)


def apart(sightings: Sequence[Sighting], world_size: int) -> Blame | None:
    """Return the blame if ranks wait for each other at two places; None otherwise.

    A rank in the backward pass needs the gradients of all other ranks. A rank that waits before
    another collective, after the same number of steps or fewer, sends no gradients until the first
    rank reaches that collective. So neither can continue. (A rank that evaluates or saves may still
    reach the backward pass.)

    Args:
        sightings: observations of all ranks.
        world_size: number of ranks.
    """
    inside = [sighting for sighting in sightings if sighting.inside]
    training = [sighting for sighting in inside if sighting.phase in (BACKWARD, UPDATING)]
    others = [sighting for sighting in inside if sighting.phase == WAITING]
    if not training or not others or len(training) + len(others) < world_size:
        return None
    if max(sighting.step for sighting in others) > min(sighting.step for sighting in training):
        return None
    places = "; ".join(
        f"{ranks_text(_ranks(group))}: {place(group[0])}" for group in (training, others)
    )
    suspects = others if len(others) < len(training) else training
    return Blame(_ranks(suspects), "HT661.places-differ", {"places": places})


def without_worker(sightings: Sequence[Sighting]) -> Blame | None:
    """Return the blame if ranks wait for a worker that cannot run; None otherwise.

    Args:
        sightings: observations of ranks.
    """
    waiting = [sighting for sighting in sightings if sighting.inside and sighting.worker]
    if not waiting:
        return None
    workers = " ".join(str(sighting.worker) for sighting in waiting[:_MOST_NAMED])
    return Blame(
        _ranks(waiting), "HT659.worker-never-ran", {**_silent(waiting), "workers": workers}
    )


_TIMEOUT = "--timeout SECONDS"


def place(sighting: Sighting) -> str:
    """Return step and phase of a rank, for messages."""
    return f"step {sighting.step}, {PHASES[sighting.phase]}"


def describe(sighting: Sighting) -> str:
    """Return the line of a rank in the report."""
    state = sighting.state
    how = f"process {sighting.pid} {STATES.get(state, state)} (state {state})"
    where = f"silent for {sighting.silence:.0f} s at {place(sighting)}"
    return f"rank {sighting.rank}: {where}; {how if state else 'its process has ended'}"


def _ranks(sightings: Sequence[Sighting]) -> tuple[int, ...]:
    return tuple(sighting.rank for sighting in sightings)


def _names(sightings: Sequence[Sighting]) -> str:
    """Return the ranks and their nodes: "rank 2 on node3", "ranks 2 and 3 on node3"."""
    hosts = {sighting.rank: sighting.host for sighting in sightings}
    return ranks_text(hosts, hosts)


def _silent(sightings: Sequence[Sighting]) -> dict[str, object]:
    """Return the values of the messages about silent ranks."""
    seconds = f"{max(sighting.silence for sighting in sightings):.0f}"
    return {"ranks": _names(sightings), "seconds": seconds, "place": place(sightings[0])}


def _kernel(sightings: Sequence[Sighting]) -> str:
    """Describe the first process in state D: its file system or device does not respond."""
    for sighting in sightings:
        if sighting.state == "D":
            where = f" in {sighting.waits_in}" if sighting.waits_in else ""
            return f"; process {sighting.pid} {STATES['D']}{where} (state D)"
    return ""


def _without_observation(missing: Sequence[int], absent: Sequence[str]) -> str:
    if not missing:
        return ""
    hosts = f" ({listed(absent)})" if absent else ""
    return f"; no observation of {ranks_text(missing)}{hosts}: not silent, or cut off"
