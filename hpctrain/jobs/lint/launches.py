"""Commands of a script that start programs: by which launcher, and what kind of program."""

import os
import re
from functools import cached_property
from typing import NamedTuple

from hpctrain.jobs.lint.lint_finding import shown
from hpctrain.jobs.lint.sbatch_options import ALIASES, SHORT, VALUED
from hpctrain.jobs.lint.shell import Command, Shell, as_in_task, plain

__all__ = ["Agent", "Launch"]

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
        "mpi": r"mpirun|mpiexec(?:\.hydra)?|horovodrun|orterun|prterun",
        "small": r"python[\d.]*|hostname|echo|printf|mkdir|cp|mv|rm|ls|cat|touch|date|true|false|"
        r"sleep|printenv|id|pwd|tar|rsync|nvidia-smi|rocm-smi|sbcast|scontrol|free|uname|df|test|"
        r"ln|chmod|find|unzip|taskset|ulimit",
        "unknown": r"[$`]\S*|(?:bash|sh)(?: -(?!\w*c\b)\S*)* [^-]\S*|\Z",
    }.items()
}
_AGENT = re.compile(
    r"(?P<name>(?:python\S* (?:-\S+ )*-m )?[\w/.$-]*"
    r"(?:torchrun|torch.distributed.(?:run|launch)|accelerate(?: |\.commands\.)launch))"
    r"(?P<options>.*?)(?P<program> (?:-m \S+|\S+\.py\b).*)",
    re.DOTALL,
)
_OPTION = re.compile(r" --?([\w-]+)(?:(?:=| (?!-))(\S+))?")
_SHELLS = ("bash", "sh", "dash", "zsh")


class Agent(NamedTuple):
    """The parts of a command of torchrun or accelerate.

    Attributes:
        name: name of the launcher, with `python -m` if it has that.
        text: options of the launcher.
        options: the same by name, with hyphens in the place of underscores.
        whole: whether these are all its options, and none is in a variable.
        program: program with its arguments.
    """

    name: str
    text: str
    options: dict[str, str]
    whole: bool
    program: str


class Launch:
    """A command that starts a program.

    Attributes:
        command: command in the script.
        line: line number of the command.
        argv: words of the command, without `exec`, `time` and similar words.
        text: text of the command, for messages.
        by: name of the launcher, such as srun; empty if the shell itself starts the program.
        options: options of srun, by long name.
        words: the program with its arguments.
        program: the same as one text.
        kind: "agent" for launchers such as torchrun, "run" for `hpctrain run`, "python" for a
            Python program, "mpi" for mpirun and the like in srun, "small" for one that needs little
            CPU time, "unknown" for a program in a variable or a script, or "other".
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
        self.words, self.program = program, " ".join(program)
        self.kind = _kind(plain(" ".join(_unwrapped(program))))
        self.trains = self.kind in ("python", "agent", "run")

    @cached_property
    def agent(self) -> Agent | None:
        """The parts of a command of torchrun or accelerate; None if it is none."""
        match = _AGENT.search(self.program) if self.kind == "agent" else None
        if not match:
            return None
        name, text, program = match.group("name", "options", "program")
        options = {key.replace("_", "-"): value for key, value in _OPTION.findall(text)}
        return Agent(name, text, options, "$" not in _OPTION.sub("", text), program)

    @property
    def chosen_nodes(self) -> bool:
        """Whether srun's options name nodes of the job."""
        return bool({"nodelist", "relative"} & self.options.keys())

    @property
    def chosen(self) -> bool:
        """Whether it is for some of the nodes, or may not be executed."""
        return self.chosen_nodes or self.command.conditional

    @property
    def in_shell(self) -> bool:
        """Whether the program is a shell, so that the rest is for this shell."""
        return bool(self.words) and os.path.basename(self.words[0]) in _SHELLS

    @property
    def around(self) -> bool:
        """Whether the program is a shell, a container or the like, which starts another one."""
        return bool(self.words) and os.path.basename(self.words[0]) in _AROUND

    @property
    def python_file(self) -> str:
        """The Python script that it starts; empty for a module, or if there is none."""
        return next((word for word in self.words if word.endswith(".py")), "")

    @cached_property
    def text_in_task(self) -> str:
        """The text after `bash -c`, with only the dollars that its shell expands; or empty."""
        return "".join(map(as_in_task, self._of_shell[-1:]))

    @cached_property
    def inside(self) -> Shell:
        """The commands of that text."""
        return Shell(self.text_in_task)

    @property
    def reads_profile(self) -> bool:
        """Whether that shell is one of a login, or an interactive one."""
        return any(re.match(r"-[a-z]*[li]|--login", word) for word in self._of_shell[:-1])

    @cached_property
    def _of_shell(self) -> list[str]:
        """The words after `bash`, up to the commands after `-c`; empty without these."""
        names = [os.path.basename(word) for word in self.words]
        rest = next((self.words[names.index(one) + 1 :] for one in _SHELLS if one in names), [])
        ends = [end for end, word in enumerate(rest[:-1]) if re.fullmatch("-[a-z]*c", word)]
        return rest[: ends[0] + 2] if ends and rest[0].startswith("-") else []

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
