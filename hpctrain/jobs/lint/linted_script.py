"""Facts of a script that the rules check: its Slurm options and the commands that it starts."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.jobs.lint.directives import Component, Directive, read_directives
from hpctrain.jobs.lint.launches import Launch, launch
from hpctrain.jobs.lint.shell import Shell, plain, read

__all__ = ["LintedScript", "Trap"]

_SHELLS = re.compile(r"#!\s*(/\S*/)?(env\s+(-\S+\s+)*)?(/\S*/)?(ba|da|k|z)?sh\b")
_GPUS = re.compile(r"(?:gres/)?gpu(?::[A-Za-z]\w*(?:[.-]\w+)*)?(?:[:=](\d{1,6}))?\Z", re.ASCII)
_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*[:=])?(\d{1,6})\Z", re.ASCII)
_SIGNALS = {"0": "EXIT", "1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}


@dataclass(frozen=True)
class Trap:
    """A `trap` of the batch shell.

    Attributes:
        line: line number.
        signals: names of the signals without SIG, and EXIT.
        body: text of the trap; empty or - if it is `trap '' …` or `trap - …`.
    """

    line: int
    signals: frozenset[str]
    body: str


class LintedScript:
    """A script and the facts of its job.

    Attributes:
        text: text of the script.
        folder: folder from which the script will be submitted.
        lines: lines of the script, without carriage returns.
        directives: #SBATCH lines.
        options: options of the job; for a heterogeneous job, those of its first part.
        heterogeneous: whether the job has several parts, as their steps are hard to distinguish.
        shell: comments and variables; empty if it is no shell script.
        commands: commands in order; empty if it is no shell script.
        steps: calls of srun.
        traps: traps in order.
    """

    def __init__(self, text: str, folder: Path) -> None:
        unix = text.replace("\r\n", "\n")
        self.text, self.folder, self.lines = text, folder, unix.split("\n")
        self.directives = read_directives(self.lines)
        self.options: Component = self.directives.components[0]
        self.heterogeneous = len(self.directives.components) > 1
        # A script in Python or another language has #SBATCH lines, and nothing else to look at.
        is_shell = _SHELLS.match(unix) or not unix.startswith("#!")
        self.shell = read(unix) if is_shell else Shell()
        self.commands = [launch(one) for one in self.shell.commands]
        self.steps = [one for one in self.commands if one.by == "srun"]
        self.traps = [trap for one in self.commands if (trap := _trap(one))]

    @property
    def all_options(self) -> list[Directive]:
        """Options of all parts of the job."""
        return [one for component in self.directives.components for one in component]

    @cached_property
    def nodes(self) -> int | None:
        """Smallest number of nodes; None if no #SBATCH line sets it."""
        match = re.match(r"(\d{1,6})(-\d{1,6})?\Z", self.options.value("nodes"), re.ASCII)
        return int(match[1]) if match and int(match[1]) else None

    @cached_property
    def tasks(self) -> tuple[int | None, int | None]:
        """Number of tasks, total and on each node; None if it is not certain."""
        total, each = self.options.number("ntasks"), self.options.number("ntasks-per-node")
        if total is not None:
            return total, _divided(total, self.nodes)
        if each is not None:
            return each * (self.nodes or 1), each
        if self.options.get("ntasks-per-gpu"):
            return None, None
        return self.nodes, 1 if self.nodes else None

    @cached_property
    def gpus_per_node(self) -> int | None:
        """Number of GPUs on each node; None if it is not certain."""
        each = _count(self.options.value("gpus-per-node"))
        if each is None and self.options.get("gres"):
            found = [_GPUS.match(one) for one in self.options.value("gres").split(",")]
            each = sum(int(match[1] or 1) for match in found if match) or None
        if each is None and (total := _count(self.options.value("gpus"))) is not None:
            each = _divided(total, self.nodes)
        if each is None and (own := _count(self.options.value("gpus-per-task"))) is not None:
            each = own * (self.tasks[1] or 0) or None
        return each

    def step_tasks(self, step: Launch) -> tuple[int | None, int | None]:
        """Return the number of tasks of an srun, total and on each node; None if not certain."""
        given = step.options
        if self.heterogeneous or {"het-group", "multi-prog"} & given.keys():
            return None, None
        if not {"ntasks", "ntasks-per-node", "nodes"} & given.keys():
            return self.tasks
        total, each = _count(given.get("ntasks", "")), _count(given.get("ntasks-per-node", ""))
        nodes = _count(given["nodes"]) if "nodes" in given else self.nodes
        if "ntasks" in given:
            return total, each or (_divided(total, nodes) if total else None)
        each = each if "ntasks-per-node" in given else self.tasks[1]
        return each * nodes if each and nodes else None, each

    def exports(self, name: str) -> bool:
        """Check whether this script exports a variable to the steps."""
        return name in self.shell.exported

    @cached_property
    def opaque(self) -> bool:
        """Whether commands are hidden in variables, in other scripts or in their functions."""
        return any(
            one.kind == "unknown"
            or one.argv[0].endswith(".sh")
            or (one.argv[0] in (".", "source") and len(one.argv) > 2)
            for one in self.commands
        )


def _divided(total: int, nodes: int | None) -> int | None:
    return total // nodes if nodes and total % nodes == 0 else None


def _count(text: str) -> int | None:
    """Return the number in `4`, `a100:4` or `a100=4`; None if there is none."""
    match = _COUNT.match(text)
    return int(match[1]) if match else None


def _trap(command: Launch) -> Trap | None:
    words = [plain(word) for word in command.argv if word != "--"]
    if words[0] != "trap" or len(words) < 3 or words[1] in ("-l", "-p"):
        return None
    names = (_SIGNALS.get(word, word.upper().removeprefix("SIG")) for word in words[2:])
    return Trap(command.line, frozenset(names), words[1])
