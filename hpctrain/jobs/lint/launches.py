"""Commands of a script that start programs: by which launcher, and what kind of program."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.jobs.lint.lint_finding import shown
from hpctrain.jobs.lint.sbatch_options import KINDS, SHORT
from hpctrain.jobs.lint.shell import Command, plain

__all__ = ["Launch", "launch"]

# srun(1), OPTIONS. Those of sbatch and others; what is in neither list has an argument.
_SRUN_FLAGS = """
bcast contiguous disable-status exact exclusive external-launcher help hold immediate
interactive kill-on-bad-exit label multi-prog nice no-allocate no-kill overcommit overlap
oversubscribe preserve-env propagate pty quiet quit-on-interrupt reboot resv-ports send-libs
share spread-job test-only unbuffered usage use-min-nodes verbose version wait-for-children
whole x11 container-mount-home container-writable container-readonly container-remap-root
"""
# Short options that take an argument: those of sbatch, except --array, and three more.
_SRUN_SHORT = {
    letter: name for letter, name in SHORT.items() if KINDS[name] == "required" and name != "array"
} | {"r": "relative", "T": "threads", "W": "wait"}
_WRAPPERS = frozenset(("exec", "time", "command", "nohup", "env", "builtin", "setsid"))
_ELSEWHERE = """
mpirun mpiexec mpiexec.hydra prun horovodrun jsrun ssh pdsh clush parallel ray dask
dask-scheduler flux aprun prterun orterun ibrun
"""
# Programs that start another one, which is somewhere in their arguments.
_AROUND = ("bash", "sh", "apptainer", "singularity", "shifter", "podman", "enroot", "numactl")
_PYTHON = r"python[\d.]*(?: -[uBEIsSOq]+| -[WX]\S*)*"
# The first kind that fits. A program that needs little CPU time is small.
_PROGRAMS = {
    kind: re.compile(rf"(?<![^\s;&|('\"])(?:[^\s;&|('\"]*/)?(?:{names})(?![^\s;&|)])", re.ASCII)
    for kind, names in {
        "agent": r"torchrun(?:-hpc)?|deepspeed|accelerate launch|"
        rf"{_PYTHON} -m (?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch)",
        "run": rf"(?:hpctrain|(?:{_PYTHON}|\$\S+) -m hpctrain) run",
        "python": rf"{_PYTHON} (?:-m (?!(?:pip|venv|compileall|site|zipfile|json|hpctrain)\b)\S+|"
        r"[^-\s]\S*)",
        "small": r"python[\d.]*|hostname|echo|printf|mkdir|cp|mv|rm|ls|cat|touch|date|true|false|"
        r"sleep|printenv|id|pwd|tar|rsync|nvidia-smi|rocm-smi|sbcast|scontrol|free|uname|df|test|"
        r"ln|chmod|find|unzip|taskset|ulimit",
        "unknown": r"[$`]\S*",
    }.items()
}
_RUN = re.compile(rf"(?:\S*/)?(?:hpctrain|(?:{_PYTHON}|\$\S+) -m hpctrain) run\Z")


@dataclass(frozen=True)
class Launch:
    """A command that starts a program.

    Attributes:
        command: command in the script.
        argv: words of the command, without `exec`, `time` and similar words.
        by: name of the launcher, such as srun; empty if the shell itself starts the program.
        options: options of srun, by long name.
        program: program with its arguments.
        kind: "agent" for launchers such as torchrun, "run" for `hpctrain run`, "python" for a
            Python program, "small", "unknown" for a program in a variable or a script, or "other".
        supervised: whether `hpctrain run` starts it, and waits for it in the batch shell.
    """

    command: Command
    argv: list[str]
    by: str
    options: dict[str, str]
    program: list[str]
    kind: str
    supervised: bool

    @property
    def line(self) -> int:
        """Line number of the command."""
        return self.command.line

    @property
    def text(self) -> str:
        """Text of the command, for messages."""
        return shown(plain(" ".join(self.argv)))

    @property
    def trains(self) -> bool:
        """Whether it starts a Python program, directly or with a launcher such as torchrun."""
        return self.kind in ("python", "agent", "run")

    @property
    def replaces_shell(self) -> bool:
        """Whether `exec` puts the program in the place of the batch shell."""
        words = self.command.words
        return words[0] == "exec" and len(words) > 1 and not self.command.function


def launch(command: Command) -> Launch:
    """Return what a command starts."""
    argv = _unwrapped(command.words)
    by, options, program = "", dict[str, str](), argv
    length = argv.index("run") + 1 if "run" in argv else 0
    length = length if _RUN.match(" ".join(argv[:length])) else 0
    once = _started_once(argv[length:]) if length else []
    if once:
        argv = program = _unwrapped(once)
    elif length:
        by = "hpctrain run"
    name = os.path.basename(argv[0])
    if name == "srun":
        by, (options, program) = name, _srun(argv[1:])
    elif name in _ELSEWHERE.split():
        by, program = name, argv[1:]
    return Launch(command, argv, by, options, program, _kind(program), bool(length))


def _kind(program: Sequence[str]) -> str:
    argv = _unwrapped(list(program))
    text, name = plain(" ".join(argv)), os.path.basename(argv[0]) if argv else ""
    for kind, pattern in _PROGRAMS.items():
        around = name in _AROUND and kind in ("agent", "run", "python")
        if pattern.search(text) if around else pattern.match(text):
            return kind
    script = name in ("bash", "sh") and not any(re.match(r"-[a-z]*c\Z", one) for one in argv)
    return "unknown" if script or not name else "other"


def _started_once(arguments: Sequence[str]) -> list[str]:
    """Return the program of `hpctrain run --once`; empty for a program that is started as ranks."""
    for index, word in enumerate(arguments):
        if word in ("--", "-m") or word.endswith(".py"):
            once = "--once" in arguments[:index]
            program = [*arguments[index + 1 :]] if word == "--" else ["python", *arguments[index:]]
            return program if once else []
    return []


def _unwrapped(argv: list[str]) -> list[str]:
    """Remove the words before a command's name, such as `exec` and `timeout`."""
    rest = list(argv)
    wrapped = False
    while len(rest) > 1:
        if rest[0] in _WRAPPERS:
            wrapped = True
        elif rest[0] == "timeout":
            while len(rest) > 2 and (rest[1].startswith("-") or rest[1][:1].isdigit()):
                rest = rest[1:]
        elif not (wrapped and (rest[0].startswith("-") or "=" in rest[0])):
            break
        rest = rest[1:]
    return rest


def _srun(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of srun by long name, and the program that it starts."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if (
                not equals
                and name not in _SRUN_FLAGS.split()
                and not name.startswith("no-")
                and rest
            ):
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
    return options, rest[1:] if rest[:1] == ["--"] else rest
