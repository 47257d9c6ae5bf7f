"""Decision which rank is to blame, from the observations of all helpers; pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.monitoring.watchdog.processes import STATES
from hpctrain.process.phases import BACKWARD, CLOSED, PHASES, UPDATING, WAITING

__all__ = ["Blame", "Sighting", "apart", "judge", "place", "suspended"]

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
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
    """

    rank: int
    host: str
    step: int
    phase: int
    silence: float
    pid: int
    state: str
    waits_in: str = ""


@dataclass(frozen=True, slots=True)
class Blame:
    """Judgement on a hang, for the error message.

    Attributes:
        ranks: ranks to blame; empty if all ranks wait for each other.
        code: code of the error.
        found: what was found, one line.
        fixes: what the user can do, one line each.
    """

    ranks: tuple[int, ...]
    code: str
    found: str
    fixes: tuple[str, ...]


def suspended(sightings: Sequence[Sighting], world_size: int) -> bool:
    """Return whether every rank is stopped: then the run was suspended and nothing hangs."""
    return len(sightings) == world_size and all(one.state in ("T", "t") for one in sightings)


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
    seen = sorted(sightings, key=lambda one: one.rank)
    inside = [one for one in seen if one.phase != CLOSED]
    alive = [one for one in inside if one.state]
    missing = sorted(set(range(world_size)) - {one.rank for one in seen})
    absent = [host for host in hosts if host not in {one.host for one in seen}]
    unheard = _unheard(missing, absent)
    if gone := [one for one in inside if not one.state]:
        silence = max((one.silence for one in alive), default=0.0)
        found = f"{_names(gone)} gone, last seen at {place(gone[0])}; the others are silent for "
        return Blame(
            _ranks(gone),
            "HT657",
            f"{found}{silence:.0f} s",
            ("look at the end of its log in logs/, and of the system's: out of memory, a kill",),
        )
    if stopped := [one for one in alive if one.state in ("T", "t")]:
        pids = " ".join(str(one.pid) for one in stopped[:_MOST_NAMED])
        return Blame(
            _ranks(stopped),
            "HT658",
            f"{_silent(stopped)}: process {pids} {STATES[stopped[0].state]} "
            f"(state {stopped[0].state})",
            (
                "find what stopped it: a debugger, Ctrl-Z or kill -STOP",
                "the next time, before the time-out: kill -CONT PROCESS",
            ),
        )
    places = sorted({(one.step, one.phase) for one in alive})
    behind = [one for one in alive if (one.step, one.phase) == places[0]]
    in_kernel = [one for one in alive if one.state == "D"]
    if len(behind) == len(alive) and 0 < len(in_kernel) < len(alive):
        behind = in_kernel
    waits = PHASES[behind[0].phase].waits
    left = [one for one in seen if one.phase == CLOSED]
    if len(behind) < len(alive) or world_size == 1 or ((missing or left) and not waits):
        found = _silent(behind) + _kernel(behind) + unheard
        return Blame(_ranks(behind), "HT659", found, _LONG)
    if missing and waits:
        found = f"{_silent(alive)}: they wait{unheard}"
        return Blame(tuple(missing), "HT660", found, _NETWORK)
    if left and waits:
        found = f"{_silent(alive)}: they wait, and {_names(left)} no longer in the run"
        return Blame(_ranks(left), "HT661", found, ("do as many steps on every rank",))
    found = f"all {len(alive)} ranks are silent for {_seconds(alive)} s at {place(alive[0])}"
    if waits:
        found += ": they wait for each other"
    code, fixes = ("HT660", _NETWORK) if waits else ("HT659", _LONG)
    return Blame((), code, found + _kernel(alive), fixes)


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
    inside = [one for one in sightings if one.state and one.phase != CLOSED]
    if len(inside) < world_size:
        return None
    training = [one for one in inside if one.phase in (BACKWARD, UPDATING)]
    others = [one for one in inside if one.phase == WAITING]
    if not training or not others or len(training) + len(others) < world_size:
        return None
    if max(one.step for one in others) > min(one.step for one in training):
        return None
    found = "; ".join(
        f"{_numbers(_ranks(those))} {'is' if len(those) == 1 else 'are'} at {place(those[0])}"
        for those in (training, others)
    )
    return Blame(
        _ranks(others if len(others) < len(training) else training),
        "HT661",
        f"the ranks wait for each other at two places: {found}",
        (
            "give all ranks as many batches, and break, save, log and evaluate on all of them, not "
            "under `if session.is_main`",
        ),
    )


_LONG = (
    "look at the stack, which shows the place",
    "--timeout SECONDS, where that may take so long",
)
_NETWORK = (
    "look at the stacks, which show the place",
    "look at the network between the hosts: hpctrain doctor",
)


def place(one: Sighting) -> str:
    """Return step and phase of a rank, for messages."""
    return f"step {one.step}, {PHASES[one.phase].words}"


def _ranks(those: Sequence[Sighting]) -> tuple[int, ...]:
    return tuple(one.rank for one in those)


def _names(those: Sequence[Sighting]) -> str:
    """Return subject and verb: "rank 2 on node3 is", "ranks 2 and 3 on node3 are"."""
    hosts = list(dict.fromkeys(one.host for one in those))
    verb = "is" if len(those) == 1 else "are"
    return f"{_numbers(_ranks(those))} on {_list(hosts)} {verb}"


def _silent(those: Sequence[Sighting]) -> str:
    return f"{_names(those)} silent for {_seconds(those)} s at {place(those[0])}"


def _seconds(those: Sequence[Sighting]) -> str:
    return f"{max(one.silence for one in those):.0f}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_list([str(rank) for rank in ranks])}"


def _list(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMED:
        words = [*words[: _MOST_NAMED - 1], f"{len(words) - _MOST_NAMED + 1} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _kernel(those: Sequence[Sighting]) -> str:
    """Describe the first process in state D: its file system or device does not respond."""
    for one in those:
        if one.state == "D":
            where = f" in {one.waits_in}" if one.waits_in else ""
            return f"; process {one.pid} {STATES['D']}{where} (state D)"
    return ""


def _unheard(missing: Sequence[int], absent: Sequence[str]) -> str:
    if not missing:
        return ""
    hosts = f" ({_list(absent)})" if absent else ""
    return f"; nothing is heard of {_numbers(missing)}{hosts}: not silent, or cut off"
