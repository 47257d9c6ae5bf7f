"""Commands of a script that start programs: by which launcher, and what kind of program."""

import os
import re

from hpctrain.jobs.lint.lint_finding import shown
from hpctrain.jobs.lint.sbatch_options import ALIASES, SHORT, VALUED
from hpctrain.jobs.lint.shell import Command, plain

__all__ = ["Launch"]

# srun(1), OPTIONS: those without a value that scripts have before a program.
_SRUN_FLAGS = """
bcast container-mount-home container-writable exact exclusive kill-on-bad-exit label multi-prog
overcommit overlap oversubscribe preserve-env propagate pty quiet unbuffered verbose whole
"""
# Short options that take an argument: those of sbatch, except --array, and a few more.
_SRUN_SHORT = {letter: name for letter, name in SHORT.items() if name in VALUED - {"array"}}
_SRUN_SHORT |= {"r": "relative", "T": "threads", "W": "wait", "K": "kill-on-bad-exit"}
_WRAPPERS = "exec time command nohup env builtin setsid timeout"
_ELSEWHERE = """
mpirun mpiexec mpiexec.hydra prun horovodrun jsrun ssh pdsh clush parallel ray dask
dask-scheduler flux aprun prterun orterun ibrun
"""
# Programs that start another one, which is somewhere in their arguments.
_AROUND = ("bash", "sh", "apptainer", "singularity", "shifter", "podman", "enroot", "numactl")
_PYTHON = r"python[\d.]*(?: -[uBEIsSOq]+| -[WX]\S*)*"
# The first kind that fits.
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
        "unknown": r"[$`]\S*|(?:bash|sh)(?: -(?!\w*c\b)\S*)* [^-]\S*|\Z",
    }.items()
}


class Launch:
    """A command that starts a program.

    Attributes:
        command: command in the script.
        line: line number of the command.
        argv: words of the command, without `exec`, `time` and similar words.
        text: text of the command, for messages.
        by: name of the launcher, such as srun; empty if the shell itself starts the program.
        options: options of srun, by long name.
        program: the program with its arguments, as one text.
        kind: "agent" for launchers such as torchrun, "run" for `hpctrain run`, "python" for a
            Python program, "small" for one that needs little CPU time, "unknown" for a program in
            a variable or a script, or "other".
        trains: whether it starts a Python program, directly or with a launcher such as torchrun.
        supervised: whether `hpctrain run` starts it, and waits for it in the batch shell.
        replaces_shell: whether `exec` puts the program in the place of the batch shell.
    """

    def __init__(self, command: Command) -> None:
        self.command, self.line = command, command.line
        self.replaces_shell = command.words[0] == "exec" and len(command.words) > 1
        argv = program = _unwrapped(command.words)
        self.by, self.options = "", dict[str, str]()
        run = _PROGRAMS["run"].match(" ".join(argv))
        self.supervised = bool(run)
        if run:
            once = _started_once(argv[run[0].count(" ") + 1 :])
            self.by = "" if once else "hpctrain run"
            argv = program = _unwrapped(once) or argv
        name = os.path.basename(argv[0])
        if name == "srun":
            self.by, (self.options, program) = name, _srun(argv[1:])
        elif name in _ELSEWHERE.split():
            self.by, program = name, argv[1:]
        self.argv, self.text = argv, shown(plain(" ".join(argv)))
        self.program = " ".join(program)
        self.kind = _kind(plain(" ".join(_unwrapped(program))))
        self.trains = self.kind in ("python", "agent", "run")

    @property
    def sources_with_arguments(self) -> bool:
        """Whether it sources a script with arguments, which may be a command.

        conda's `source activate NAME` has the name of an environment.
        """
        sources = self.argv[0] in (".", "source") and len(self.argv) > 2
        return sources and os.path.basename(self.argv[1]) != "activate"


def _kind(text: str) -> str:
    around = os.path.basename(text.partition(" ")[0]) in _AROUND
    for kind, pattern in _PROGRAMS.items():
        anywhere = around and kind in ("agent", "run", "python")
        if pattern.search(text) if anywhere else pattern.match(text):
            return kind
    return "other"


def _started_once(arguments: list[str]) -> list[str]:
    """Return the program of `hpctrain run --once`; empty for a program that is started as ranks."""
    for index, word in enumerate(arguments):
        if word in ("--", "-m") or word.endswith(".py"):
            program = arguments[index + 1 :] if word == "--" else ["python", *arguments[index:]]
            return program if "--once" in arguments[:index] else []
    return []


def _unwrapped(argv: list[str]) -> list[str]:
    """Remove the words before a command's name, such as `exec` and `timeout 50m`."""
    rest = list(argv)
    while len(rest) > 1 and (
        rest[0] in _WRAPPERS.split() or (len(rest) < len(argv) and re.match(r"-|\d|\w+=", rest[0]))
    ):
        del rest[0]
    return rest


def _srun(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of srun by long name, and the program that it starts."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and re.match(r"--?[^-]", rest[0]):
        word = rest.pop(0)
        name, equals, value = word[2:].partition("=")
        flag = equals or name in _SRUN_FLAGS.split() or name.startswith("no-")
        if word[1] != "-":
            letter = next((one for one in word[1:] if one in _SRUN_SHORT), "")
            name, value = _SRUN_SHORT.get(letter, ""), word.partition(letter)[2] if letter else ""
            flag = value or letter in ("K", "")
        options[ALIASES.get(name, name)] = value if flag or not rest else rest.pop(0)
    return options, rest[1:] if rest[:1] == ["--"] else rest
