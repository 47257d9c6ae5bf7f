"""Facts of a script that the rules check: its Slurm options and the commands that it starts."""

import re
from functools import cached_property
from pathlib import Path

from hpctrain.jobs.lint.directives import SIGNALS, Directives
from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.shell import Shell, plain

__all__ = ["OF_A_TASK", "LintedScript"]

#: A variable that differs from task to task. A dollar that does not expand is another character in
#: the words of a command.
OF_A_TASK = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
_SHELLS = re.compile(r"#!\s*(/\S*/)?(env\s+(-\S+\s+)*)?(/\S*/)?(ba|da|k|z)?sh\b|(?!#!)")
_GPUS = re.compile(r"(?:gres/)?gpu(?::[A-Za-z][\w.-]*)?(?:[:=]([0-9]{1,6}))?\Z")
_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*[:=])?([0-9]{1,6})(?:-[0-9]{1,6})?\Z")
_TASKS = ("ntasks", "ntasks-per-node", "nodes")


class LintedScript:
    """A script and the facts of its job.

    Attributes:
        text: text of the script.
        folder: folder from which the script will be submitted.
        directives: #SBATCH lines.
        options: options of the job; for a heterogeneous job, those of its first part.
        shell: comments and variables; empty if it is no shell script.
        launches: commands in order; empty if it is no shell script, and for a heterogeneous job,
            whose steps are hard to distinguish.
        steps: calls of srun, and the training that lacks one.
        traps: line and text of each trap of the batch shell, by signal without SIG, and EXIT.
    """

    def __init__(self, text: str, folder: Path) -> None:
        unix = text.replace("\r\n", "\n")
        self.text, self.folder = text, folder
        # A script in Python or another language has #SBATCH lines, and nothing else to look at.
        self.shell = Shell(unix if _SHELLS.match(unix) else "")
        self.directives = Directives(unix.split("\n"), self.shell.comments)
        self.options = self.directives.parts[0]
        several = len(self.directives.parts) > 1
        self.launches = [] if several else [Launch(one) for one in self.shell.commands]
        self.steps = [one for one in self.launches if one.by == "srun" or one is self.lacks_srun]
        self.traps: dict[str, tuple[int, str]] = {}
        for one in self.launches:
            words = [plain(word) for word in one.argv if word != "--"]
            if words[0] == "trap" and len(words) > 2:
                names = (SIGNALS.get(word, word.upper().removeprefix("SIG")) for word in words[2:])
                self.traps |= dict.fromkeys(names, (one.line, words[1]))

    def value(self, name: str) -> str:
        """Return the value of an option of the job; empty if it is not given."""
        return self.options[name].value if name in self.options else ""

    def count(self, name: str) -> int | None:
        """Return the number in an option such as `4` or `a100:4`; None if there is none."""
        return _count(self.value(name))

    @property
    def tasks_per_node(self) -> int | None:
        """Number of tasks of the job on each node; None if it is not certain."""
        return self.tasks_of({})[1]

    @cached_property
    def gpus_per_node(self) -> int:
        """Number of GPUs on each node; 0 if it is not certain."""
        gres = [match for one in self.value("gres").split(",") if (match := _GPUS.match(one))]
        return (
            self.count("gpus-per-node")
            or sum(int(match[1] or 1) for match in gres)
            or _divided(self.count("gpus"), self.count("nodes"))
            or (self.count("gpus-per-task") or 0) * (self.tasks_per_node or 0)
        )

    def tasks_of(self, step: dict[str, str]) -> tuple[int | None, int | None]:
        """Return the number of tasks, total and on each node; None if it is not certain.

        Args:
            step: options of an srun; empty for the job.
        """
        own = {name: _count(step[name]) for name in _TASKS if name in step}
        if None in own.values() or {"het-group", "multi-prog"} & step.keys():
            return None, None
        total, each, nodes = (own.get(name, self.count(name)) for name in _TASKS)
        if total and ("ntasks" in own or not own):
            return total, own.get("ntasks-per-node") or _divided(total, nodes)
        if not each and (total or not nodes or "ntasks-per-gpu" in self.options):
            return None, None
        return (each or 1) * (nodes or 1), each or 1

    @cached_property
    def opaque(self) -> bool:
        """Whether commands are hidden in variables, in other scripts or in their functions."""
        return any(
            one.kind == "unknown" or one.argv[0].endswith(".sh") or one.sources_with_arguments
            for one in self.launches
        )

    @cached_property
    def lacks_srun(self) -> Launch | None:
        """Training that starts once, on the first node, although it has several tasks or nodes.

        On one node torchrun is right without srun, and so is a program with its own processes.
        With `hpctrain run --once` a person says that the program starts its ranks itself.
        """
        if any(one.by for one in self.launches) or self.opaque:
            return None
        for one in self.launches:
            ranks = 1 < self.gpus_per_node == self.tasks_per_node and one.kind == "python"
            intended = one.supervised and one.kind == "python"
            if one.trains and not intended and ((self.count("nodes") or 1) > 1 or ranks):
                return one
        return None


def _divided(total: int | None, nodes: int | None) -> int | None:
    return total // nodes if total and nodes and total % nodes == 0 else None


def _count(text: str) -> int | None:
    """Return the number in `4`, `2-4`, `a100:4` or `a100=4`; None if there is none."""
    match = _COUNT.match(text)
    return int(match[1]) if match else None
