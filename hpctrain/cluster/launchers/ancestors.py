"""What a process shows of its start besides its environment.

That is its arguments, its ancestors, and whether multiprocessing made it. Linux's /proc tells;
where there is none, nothing is known, and nothing is refused.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["CONTROL_PORT", "LOCAL_RANK_ARGUMENT", "PARENT", "SLURM_STEP", "Ancestor", "Process"]

# Facts that a launcher reads beside the variables, under names that no variable can have.
LOCAL_RANK_ARGUMENT = "--local-rank"  # of the old torch.distributed.launch
PARENT = "--launching-process"  # `name/pid` of the nearest ancestor that launches
SLURM_STEP = "--slurm-step"  # `job.step` of slurmstepd; the step is a number, batch, extern, …
CONTROL_PORT = "--control-port"  # of the mpiexec that started this host's hydra_pmi_proxy

_LOCAL_RANK = re.compile(r"--local[-_]rank(?:=(.*))?\Z", re.DOTALL)
# The options of Python that take a value, alone or after others: `-X dev`, `-um MODULE`.
_VALUED = re.compile(r"-[^-cmWX]*([cmWX])(.*)\Z", re.DOTALL)
# slurmstepd writes job and step into its title; with het jobs also the component.
_TITLE = re.compile(r"slurmstepd: \[([0-9]+)(?:\+[0-9]+)?\.([a-z0-9]+)(?:\+[0-9]+)?\]")

# The programs that launch ranks, and the launchers (by `Launcher.name`) whose variables they set.
LAUNCHING = {
    "slurmstepd": "slurm",
    "mpirun": "openmpi",
    "mpirun.openmpi": "openmpi",
    "mpiexec.openmpi": "openmpi",
    "orterun": "openmpi",
    "orted": "openmpi",
    "prterun": "openmpi",
    "prted": "openmpi",
    "hydra_pmi_proxy": "hydra",
    "mpispawn": "mvapich2",
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "horovodrun": "horovodrun",
    "flux-shell": "flux",
    "palsd": "pals",
}


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process from which this one descends, and that launches ranks.

    Attributes:
        pid: its id.
        program: as `LAUNCHING` has it.
        launcher: whose variables it sets.
        title: its command line, as far as the first argument.
        control: of hydra_pmi_proxy, `host:port` of the mpiexec that all of a start report to.
        started: the environment that it gave the child from which this process descends.
    """

    pid: int
    program: str
    launcher: str
    title: str = ""
    control: str = ""
    started: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Process:
    """The facts; the default is a process of which nothing is known.

    Attributes:
        arguments: its command line, with the interpreter.
        launched_by: the nearest ancestor that launches ranks.
        inherited: the environment that multiprocessing started it with; None where it was not
            started so.
    """

    arguments: tuple[str, ...] = ()
    launched_by: Ancestor | None = None
    inherited: Mapping[str, str] | None = None

    @classmethod
    def current(cls) -> "Process":
        """Of this process."""
        return cls(tuple(sys.orig_argv), _launched_by(os.getpid()), _inherited())

    def facts(self) -> dict[str, str]:
        """What launchers read beside the variables."""
        facts = {}
        local_rank = _local_rank(self.arguments)
        if local_rank is not None:
            facts[LOCAL_RANK_ARGUMENT] = local_rank
        if self.launched_by:
            facts[PARENT] = f"{self.launched_by.program}/{self.launched_by.pid}"
            step = _TITLE.match(self.launched_by.title)
            if step:
                facts[SLURM_STEP] = f"{step[1]}.{step[2]}"
            if self.launched_by.control:
                facts[CONTROL_PORT] = self.launched_by.control
        return facts


def _local_rank(arguments: tuple[str, ...]) -> str | None:
    for index, argument in enumerate(arguments):
        match = _LOCAL_RANK.match(argument)
        if match:
            return match[1] if match[1] is not None else "".join(arguments[index + 1 : index + 2])
    return None


def _ancestors(pid: int) -> Iterator[int]:
    """The parent, its parent, and so on, as far as this process may see."""
    while pid > 1:
        try:
            # The program's name, in brackets, may hold anything, brackets too; it is cut at 15
            # bytes, which may be within a letter: proc(5).
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid


def _launched_by(pid: int) -> Ancestor | None:
    for parent in _ancestors(pid):
        found = _launches(parent)
        if found:
            return replace(found, started=_environ(pid) or {})
        pid = parent
    return None


def _launches(pid: int) -> Ancestor | None:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    # The colon is that of slurmstepd's title.
    names = [name, command[0].rpartition("/")[2].partition(":")[0]]
    if names[1].startswith("python"):
        names.append(_script(command[1:]))
    for program in names:
        if program in LAUNCHING:
            following = dict(itertools.pairwise(command))
            control = following.get(CONTROL_PORT, "") if program == "hydra_pmi_proxy" else ""
            return Ancestor(pid, program, LAUNCHING[program], command[0], control)
    return None


def _script(arguments: Sequence[str]) -> str:
    """The script or the module that a Python with these arguments runs; "" for neither."""
    rest = iter(arguments)
    for argument in rest:
        valued = _VALUED.match(argument)
        if valued:
            value = valued[2] or next(rest, "")
            if valued[1] in "cm":
                return value if valued[1] == "m" else ""
        elif not argument.startswith("-"):
            return argument.rpartition("/")[2]
    return ""


def _inherited() -> dict[str, str] | None:
    # Where it is not imported, it did not start this process.
    process = sys.modules.get("multiprocessing.process")
    parent = process.parent_process() if process else None
    # The parent's first environment: what it set since then, it set for its children.
    return None if parent is None else _environ(parent.pid)


def _environ(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None where this one may not see it."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
