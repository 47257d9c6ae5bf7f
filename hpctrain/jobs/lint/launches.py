"""Commands of a script with the values of their variables: which program starts, and how."""

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.jobs.lint.bash import Command, Shell, read
from hpctrain.jobs.lint.sbatch_options import SHORT, argument
from hpctrain.jobs.lint.variables import Variables

__all__ = ["Launch", "kind_of_program", "launches"]


def _listed(names: str) -> frozenset[str]:
    return frozenset(names.split())


# srun(1), OPTIONS. Those of sbatch and others; what is in neither list has an argument.
_SRUN_FLAGS = _listed(
    """
    bcast contiguous disable-status exact exclusive external-launcher help hold immediate
    interactive kill-on-bad-exit label multi-prog nice no-allocate no-kill overcommit overlap
    oversubscribe preserve-env propagate pty quiet quit-on-interrupt reboot resv-ports send-libs
    share spread-job test-only unbuffered usage use-min-nodes verbose version wait-for-children
    whole x11 container-mount-home container-writable container-readonly container-remap-root
    """
)
# Short options that take an argument: those of sbatch, except --array, and three more.
_SRUN_SHORT = {
    letter: name
    for letter, name in SHORT.items()
    if argument(name) == "required" and name != "array"
} | {"r": "relative", "T": "threads", "W": "wait"}
_WRAPPERS = frozenset(("exec", "time", "command", "nohup", "env", "builtin", "setsid"))
_ELSEWHERE = _listed(
    """
    mpirun mpiexec mpiexec.hydra prun horovodrun jsrun ssh pdsh clush parallel ray dask
    dask-scheduler flux aprun prterun orterun ibrun
    """
)
_AGENTS = frozenset(("torchrun", "accelerate", "deepspeed", "torchrun-hpc"))
_AGENT_MODULES = frozenset(
    ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
)
_PYTHON = re.compile(r"python\d*(\.\d+)?\Z")
_RUN = "hpctrain run"
# Options of `hpctrain run` without an argument; all others before the program have one.
_RUN_FLAGS = frozenset(
    ("--direct", "--elastic", "--help", "--module", "--once", "--requeue-plain", "--retry")
)
_NO_TRAINING = frozenset(("pip", "venv", "compileall", "site", "zipfile", "json.tool", "hpctrain"))
_SMALL = _listed(
    """
    hostname echo printf mkdir cp mv rm ls cat touch date true false sleep env printenv id pwd tar
    rsync nvidia-smi rocm-smi sbcast scontrol free uname df test ln chmod find unzip taskset ulimit
    """
)


@dataclass(frozen=True)
class Launch:
    """A command that starts a program.

    Attributes:
        command: command in the script.
        argv: words with the values of their variables, without `exec`, `time` and similar words.
        by: name of the launcher, such as srun; empty if the shell itself starts the program.
        options: options of srun, by long name.
        program: program with its arguments.
        kind: kind of the program, from `kind_of_program`.
        replaces_shell: whether `exec` starts it.
        supervised: whether `hpctrain run` starts it, and waits for it in the batch shell.
    """

    command: Command
    argv: list[str]
    by: str
    options: dict[str, str]
    program: list[str]
    kind: str
    replaces_shell: bool
    supervised: bool = False

    @property
    def trains(self) -> bool:
        """Whether it starts a Python program, directly or with a launcher such as torchrun."""
        return self.kind in ("python", "agent", "run")


def launches(shell: Shell, variables: Variables) -> list[Launch]:
    """Return the commands that have a name, in their order."""
    return [_launch(one, variables) for one in shell.commands if one.words]


def _launch(command: Command, variables: Variables) -> Launch:
    argv = variables.expand(command.words) or [""]
    replaces = argv[0] == "exec" and len(argv) > 1
    argv = _unwrapped(argv)
    arguments = _of_hpctrain_run(argv)
    supervised = arguments is not None
    if arguments is not None:
        once = _started_once(arguments)
        if not once:
            return Launch(command, argv, _RUN, {}, argv, "run", replaces, supervised)
        argv = _unwrapped(once)
    name = os.path.basename(argv[0])
    if name == "srun":
        options, program = _srun(argv[1:])
        kind = kind_of_program(program)
        return Launch(command, argv, name, options, program, kind, replaces, supervised)
    if name in _ELSEWHERE:
        return Launch(command, argv, name, {}, argv[1:], "other", replaces, supervised)
    return Launch(command, argv, "", {}, argv, kind_of_program(argv), replaces, supervised)


def _of_hpctrain_run(argv: Sequence[str]) -> list[str] | None:
    """Return the arguments of `hpctrain run`; None for another command."""
    name, rest = os.path.basename(argv[0]), list(argv[1:])
    module = rest[:2] == ["-m", "hpctrain"] and (_PYTHON.match(name) or name.startswith("$"))
    rest = rest[2:] if module else rest
    is_run = rest[:1] == ["run"] and (module or name == "hpctrain")
    return rest[1:] if is_run else None


def _started_once(arguments: Sequence[str]) -> list[str]:
    """Return the program of `hpctrain run --once`; empty for a program that is started as ranks."""
    rest, once = list(arguments), False
    while rest and rest[0].startswith("-") and rest[0] not in ("--", "-m"):
        option = rest.pop(0)
        once = once or option == "--once"
        if option not in _RUN_FLAGS and "=" not in option and rest:
            rest.pop(0)
    if not once or not rest:
        return []
    return rest[1:] if rest[0] == "--" else ["python", *rest]


def _unwrapped(argv: list[str]) -> list[str]:
    """Remove the words before a command's name, such as `exec` and `timeout`."""
    rest = list(argv)
    wrapped = False
    while len(rest) > 1:
        if rest[0] in _WRAPPERS:
            wrapped = True
            rest = rest[1:]
        elif rest[0] == "timeout":
            rest = rest[1:]
            while len(rest) > 1 and (rest[0].startswith("-") or rest[0][:1].isdigit()):
                rest = rest[1:]
        elif wrapped and (rest[0].startswith("-") or "=" in rest[0]):
            rest = rest[1:]
        else:
            break
    return rest


def _srun(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of srun by long name, and the program that it starts."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest[0]
        if word == "--":
            return options, rest[1:]
        if not word.startswith("-") or word == "-":
            break
        rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flag = name in _SRUN_FLAGS or name.startswith("no-")
            if not equals and not flag and rest:
                value = rest.pop(0)
            options["ntasks-per-node" if name == "tasks-per-node" else name] = value
            continue
        for index, letter in enumerate(word[1:], 1):
            name, value = _SRUN_SHORT.get(letter, ""), word[index + 1 :]
            if letter == "K":
                options["kill-on-bad-exit"] = value if value.isdigit() else ""
            elif name:
                options[name] = value or (rest.pop(0) if rest else "")
                break
    return options, rest


def kind_of_program(argv: Sequence[str]) -> str:
    """Return the kind of a program.

    Returns:
        "agent" for launchers such as torchrun, "run" for `hpctrain run`, "python" for a Python
        program, "small" for a program that needs little CPU time, "unknown" if the program is in a
        variable, or "other".
    """
    argv = _unwrapped(list(argv)) if argv else [""]
    name = os.path.basename(argv[0])
    kind = "other"
    if _of_hpctrain_run(argv) is not None:
        kind = "run"
    elif name in _AGENTS:
        # `accelerate config` and the like start nothing.
        kind = "agent" if name != "accelerate" or argv[1:2] == ["launch"] else "small"
    elif _PYTHON.match(name):
        kind = _kind_of_python(argv[1:])
    elif name in _SMALL:
        kind = "small"
    elif name.startswith(("$", "`")) or not name:
        kind = "unknown"
    elif name in ("bash", "sh"):
        kind = _kind_of_shell(argv[1:])
    elif name in ("apptainer", "singularity", "shifter", "podman", "enroot", "numactl"):
        kind = _kind_in_container(argv[1:])
    return kind


def _kind_of_python(arguments: Sequence[str]) -> str:
    rest = [word for word in arguments if not re.match(r"-[uBEIsSOq]+\Z|-[WX]", word)]
    if not rest or rest[0] in ("-c", "-", "-V", "--version", "-h", "--help"):
        return "small"
    if rest[0] == "-m" and len(rest) > 1:
        if rest[1] in _AGENT_MODULES:
            return "agent"
        return "other" if rest[1].partition(".")[0] in _NO_TRAINING else "python"
    return "python"


def _kind_of_shell(arguments: Sequence[str]) -> str:
    """Return the kind of the programs in `bash -c '…'`; "unknown" for another script."""
    for option, text in itertools.pairwise(arguments):
        if re.match(r"-[a-z]*c\Z", option):
            shell = read(text)
            found = launches(shell, Variables(shell))
            kinds = {one.kind for one in found if one.by in ("", _RUN)}
            return next((kind for kind in ("agent", "run", "python") if kind in kinds), "other")
    return "unknown"


def _kind_in_container(arguments: Sequence[str]) -> str:
    for index, word in enumerate(arguments):
        name = os.path.basename(word)
        if name in _AGENTS or name in ("bash", "sh", "hpctrain") or _PYTHON.match(name):
            return kind_of_program(arguments[index:])
    return "other"
