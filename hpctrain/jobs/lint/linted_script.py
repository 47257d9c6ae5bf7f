"""Facts of a script that the rules check: its Slurm options and the commands that it starts."""

import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.jobs.lint.bash import Command, Comment, Shell, read
from hpctrain.jobs.lint.directive_reader import Component, read_directives
from hpctrain.jobs.lint.launches import Launch, launches
from hpctrain.jobs.lint.lint_finding import LintFinding
from hpctrain.jobs.lint.variables import Variables

__all__ = ["LintedScript", "Trap", "load"]

_SHELLS = re.compile(r"#!\s*(/\S*/)?(env\s+(-\S+\s+)*)?(/\S*/)?(ba|da|k|z)?sh\b")
_GPUS = re.compile(r"(?:gres/)?gpu(?::[A-Za-z]\w*(?:[.-]\w+)*)?(?:[:=](\d{1,6}))?\Z", re.ASCII)
_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*[:=])?(\d{1,6})\Z", re.ASCII)


@dataclass(frozen=True)
class Trap:
    """A `trap` of the batch shell.

    Attributes:
        command: command in the script.
        signals: names of the signals without SIG, and EXIT.
        body: text of the trap.
        ignores: whether it is `trap '' …` or `trap - …`.
    """

    command: Command
    signals: frozenset[str]
    body: str
    ignores: bool


@dataclass(frozen=True)
class LintedScript:
    """A script and the facts of its job.

    Attributes:
        text: text of the script.
        folder: folder from which the script will be submitted.
        components: #SBATCH options; several components for a heterogeneous job.
        refused: findings in the #SBATCH lines themselves.
        end: number of the first line after the #SBATCH lines.
        comments: comments of the whole script.
        commands: commands that have a name, in order; empty if it is no shell script.
        variables: variables of the script.
        traps: traps in order.
    """

    text: str
    folder: Path
    components: list[Component]
    refused: list[LintFinding]
    end: int
    comments: list[Comment]
    commands: list[Launch]
    variables: Variables
    traps: list[Trap]

    @property
    def options(self) -> Component:
        """Options of the job; for a heterogeneous job, those of its first part."""
        return self.components[0]

    @property
    def heterogeneous(self) -> bool:
        """Whether the job has several parts, as their steps are hard to distinguish."""
        return len(self.components) > 1

    @property
    def steps(self) -> list[Launch]:
        """Calls of srun."""
        return [one for one in self.commands if one.by == "srun"]

    @property
    def nodes(self) -> int | None:
        """Smallest number of nodes; None if no #SBATCH line sets it."""
        match = re.match(r"(\d{1,6})(-\d{1,6})?\Z", self.options.value("nodes"), re.ASCII)
        return int(match[1]) if match and int(match[1]) else None

    @property
    def tasks(self) -> int | None:
        """Number of tasks; None if no #SBATCH line sets it."""
        total, each = self.options.number("ntasks"), self.options.number("ntasks-per-node")
        if total is not None:
            return total
        if each is not None:
            return each * (self.nodes or 1)
        return None if self.options.get("ntasks-per-gpu") else self.nodes

    @property
    def tasks_per_node(self) -> int | None:
        """Number of tasks on each node; None if it is not certain."""
        each, total = self.options.number("ntasks-per-node"), self.options.number("ntasks")
        if total is not None:
            nodes = self.nodes
            return total // nodes if nodes and total % nodes == 0 else None
        if each is not None or self.options.get("ntasks-per-gpu"):
            return each
        return 1 if self.nodes else None

    @property
    def gpus_per_node(self) -> int | None:
        """Number of GPUs on each node; None if it is not certain."""
        each = _count(self.options.value("gpus-per-node"))
        if each is None and self.options.get("gres"):
            found = [_GPUS.match(one) for one in self.options.value("gres").split(",")]
            each = sum(int(match[1] or 1) for match in found if match) or None
        if each is None and (total := _count(self.options.value("gpus"))) is not None:
            nodes = self.nodes
            each = total // nodes if nodes and total % nodes == 0 else None
        if each is None and (own := _count(self.options.value("gpus-per-task"))) is not None:
            each = own * self.tasks_per_node if self.tasks_per_node else None
        return each

    def step_tasks(self, step: Launch) -> tuple[int | None, int | None]:
        """Return the number of tasks of an srun, total and on each node; None if not certain."""
        own = {"ntasks", "ntasks-per-node", "nodes", "n"} & step.options.keys()
        if self.heterogeneous or "het-group" in step.options or "multi-prog" in step.options:
            return None, None
        if not own:
            return self.tasks, self.tasks_per_node
        total, each = (_int(step.options.get(name)) for name in ("ntasks", "ntasks-per-node"))
        nodes = _int(step.options.get("nodes")) if "nodes" in step.options else self.nodes
        if total is None and "ntasks" not in step.options and nodes:
            if each is None and "ntasks-per-node" not in step.options:
                each = self.tasks_per_node
            total = each * nodes if each else None
        elif total is not None and each is None and nodes and total % nodes == 0:
            each = total // nodes
        return total, each

    def exports(self, name: str) -> bool:
        """Check whether this script exports a variable to the steps."""
        return name in self.variables.exported

    @property
    def opaque(self) -> bool:
        """Whether commands are hidden in variables, in other scripts or in their functions."""
        return any(
            one.kind == "unknown"
            or one.argv[0].endswith(".sh")
            or (one.argv[0] in (".", "source") and len(one.argv) > 2)
            for one in self.commands
        )


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None


def _count(text: str) -> int | None:
    """Return the number in `4`, `a100:4` or `a100=4`; None if there is none."""
    match = _COUNT.match(text)
    return int(match[1]) if match else None


def load(text: str, folder: Path) -> LintedScript:
    """Read a script.

    Args:
        text: text of the script, with line feeds at the ends of lines.
        folder: folder from which the script will be submitted.
    """
    lines = text.split("\n")
    components, refused, end = read_directives(lines)
    # A script in Python or another language has #SBATCH lines, and nothing else to look at.
    shell = read(text) if _SHELLS.match(lines[0]) or not lines[0].startswith("#!") else Shell()
    variables = Variables(shell)
    commands = launches(shell, variables)
    traps = [trap for one in commands if (trap := _trap(one))]
    return LintedScript(
        text, folder, components, refused, end, shell.comments, commands, variables, traps
    )


def _trap(launch: Launch) -> Trap | None:
    words = [word for word in launch.argv if word != "--"]
    if words[0] != "trap" or len(words) < 3 or words[1] in ("-l", "-p"):
        return None
    names = frozenset(_signal(word) for word in words[2:])
    return Trap(launch.command, names, words[1], words[1] in ("", "-"))


def _signal(word: str) -> str:
    numbers = {"0": "EXIT", "1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
    return numbers.get(word, word.upper().removeprefix("SIG"))
