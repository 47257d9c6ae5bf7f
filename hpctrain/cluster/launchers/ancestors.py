"""Facts about the start of a process that are not in its environment.

These are its arguments, its host, its ancestors, its terminal, and whether multiprocessing started
it. Ancestors and parents are not always known. Then no process is refused because of them.
"""

import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hpctrain.cluster import env_vars, system

__all__ = [
    "CONTROL_PORT",
    "IN_A_SHELL",
    "LOCAL_RANK_ARGUMENT",
    "PARENT",
    "SLURM_STEP",
    "Ancestor",
    "Process",
]

# Facts that a launcher reads with the variables, under names that no variable can have.
LOCAL_RANK_ARGUMENT = "--local-rank"  # argument from the old torch.distributed.launch
PARENT = "--launching-process"  # `name/pid` of the nearest ancestor that launches ranks
SLURM_STEP = "--slurm-step"  # `job.step` of slurmstepd; the step is a number, batch, extern, …
CONTROL_PORT = "--control-port"  # port of the mpiexec that started hydra_pmi_proxy here
IN_A_SHELL = "--in-a-shell"  # program of `srun --pty` that a person types to, such as bash

_LOCAL_RANK = re.compile(r"--local[-_]rank(?:=(.*))?\Z", re.DOTALL)
# Python options with a value, separate or combined with others: `-X dev`, `-um MODULE`.
_VALUED = re.compile(r"-[^-cmWX]*([cmWX])(.*)\Z", re.DOTALL)
# slurmstepd writes job and step into its title; for heterogeneous jobs also the component.
_TITLE = re.compile(r"slurmstepd: \[([0-9]+)(?:\+[0-9]+)?\.([a-z0-9]+)(?:\+[0-9]+)?\]")

# Programs that launch ranks, and the `Launcher.name` of the launcher whose variables they set.
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

# Programs that a person types to, if they get only options: no script, module or command.
_TYPED_TO = re.compile(r"(?:(?:ba|da|fi|k|tc|c|z)?sh|i?python[0-9.]*)\Z")
_ONLY_AN_OPTION = re.compile(r"--|-[^cm]*\Z")

_OF_SLURM = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")
# Variables that only ranks have, by their launcher.
_OF_RANKS = (
    *(env_vars.START, "TORCHELASTIC_RUN_ID", "HOROVOD_RANK"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor of this process that launches ranks.

    Attributes:
        pid: process id.
        program: name of the program, a key of `LAUNCHING`.
        launcher: name of the launcher whose variables the program sets.
        title: first word of the command line, without the arguments.
        control: for hydra_pmi_proxy, `host:port` of the mpiexec of this start; else "".
        started: environment with which it started the child that this process descends from.
    """

    pid: int
    program: str
    launcher: str
    title: str = ""
    control: str = ""
    started: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about a process; by default there are none.

    Attributes:
        arguments: command line, with the interpreter.
        launched_by: nearest ancestor that launches ranks, or None.
        inherited: environment of the parent that started the process with multiprocessing; None
            if it was started in another way.
        host: name of this host.
        terminal: whether the process has a controlling terminal.
        task: command line of the task of srun that this process is, or descends from.
        repeats: whether multiprocessing runs the script of the parent again in this process, to
            import it.
    """

    arguments: tuple[str, ...] = ()
    launched_by: Ancestor | None = None
    inherited: Mapping[str, str] | None = None
    host: str = ""
    terminal: bool = False
    task: tuple[str, ...] = ()
    repeats: bool = False

    @classmethod
    def current(cls) -> "Process":
        """Collect the facts about this process."""
        launched_by, inherited = _launched_by(os.getpid()), _inherited()
        return cls(
            tuple(sys.orig_argv),
            launched_by,
            inherited,
            socket.gethostname(),
            _has_terminal(),
            _task(),
            _repeats(),
        )

    def own(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment without the variables of a rank or shell that submitted this job.

        sbatch passes them on to the batch script, which no launcher of ranks has started. Those of
        Slurm are kept, as sbatch sets most of them anew.

        Args:
            env: environment of this process.
        """
        own, parent = dict(env), self.launched_by
        title = _TITLE.match(parent.title) if parent else None
        if parent is None or title is None:
            return own
        # sbatch and srun also pass on what makes a process a shell or a notebook. The shell of
        # `srun --pty` has a terminal, and Jupyter starts its kernels below slurmstepd.
        if not self.terminal:
            own.pop(env_vars.PTY_PORT, None)
        if own.get(env_vars.KERNEL) == parent.started.get(env_vars.KERNEL):
            own.pop(env_vars.KERNEL, None)
        passed = {name: parent.started[name] for name in _OF_RANKS if name in parent.started}
        if (
            title[2] != "batch"
            or not passed
            or passed != {k: own[k] for k in _OF_RANKS if k in own}
        ):
            return own  # a launcher was started since
        kept = (*env_vars.scrubbed(own), env_vars.LAUNCHER, env_vars.STOP_FILE)
        return {k: v for k, v in own.items() if k in kept or k.startswith(_OF_SLURM)}

    def facts(self) -> dict[str, str]:
        """Return the facts that launchers read with the variables."""
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
        if self.terminal and (shell := _typed_to(self.task)):
            facts[IN_A_SHELL] = shell
        return facts


def _local_rank(arguments: tuple[str, ...]) -> str | None:
    for index, argument in enumerate(arguments):
        match = _LOCAL_RANK.match(argument)
        if match:
            return match[1] if match[1] is not None else "".join(arguments[index + 1 : index + 2])
    return None


def _launched_by(pid: int) -> Ancestor | None:
    with suppress(OSError):  # the system shows no more ancestors
        while pid > 1:
            parent = system.stat(pid).parent
            found = _launches(parent)
            if found:
                return replace(found, started=system.environment(pid) or {})
            pid = parent
    return None


def _launches(pid: int) -> Ancestor | None:
    name, command = system.name(pid), system.arguments(pid)
    # The title of slurmstepd has a colon after the name.
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
    """Return the script or module that Python runs with these arguments; "" for neither."""
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


def _task() -> tuple[str, ...]:
    # slurmd sets it in each task. Slurm's own processes may be hidden (hidepid of /proc).
    pid, task = os.getpid(), os.environ.get("SLURM_TASK_PID", "")
    with suppress(OSError):  # the system shows no more ancestors
        while task and pid > 1:
            if str(pid) == task:
                return tuple(system.arguments(pid))
            pid = system.stat(pid).parent
    return ()


def _typed_to(command: Sequence[str]) -> str:
    """Return the program of a command line that a person types to; "" for another one."""
    names = [word.rpartition("/")[2] for word in command if word]
    if names[1:2] == ["ipython"]:  # a script of Python
        del names[0]
    name = names[0].removeprefix("-") if names else ""  # of a login shell
    only_options = all(map(_ONLY_AN_OPTION.match, names[1:]))
    return name if _TYPED_TO.match(name) and only_options else ""


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def _repeats() -> bool:
    # As multiprocessing asks itself before it starts a process.
    # Source: _check_not_importing_main in multiprocessing/spawn.py of Python 3.11.
    process = sys.modules.get("multiprocessing.process")
    return bool(process and getattr(process.current_process(), "_inheriting", False))


def _inherited() -> dict[str, str] | None:
    # If the module is not imported, multiprocessing did not start this process.
    process = sys.modules.get("multiprocessing.process")
    parent = process.parent_process() if process else None
    # The initial environment of the parent: later changes are values it set for its children.
    initial = None if parent is None else system.environment(parent.pid)
    if initial is None or env_vars.BEGAN in initial:
        return initial
    began: dict[str, str] = json.loads(os.environ.get(env_vars.BEGAN, "{}"))
    return initial | began
