"""Facts of a script that the rules check: its Slurm options and the commands that it starts."""

import math
import re
from functools import cached_property
from pathlib import Path

from hpctrain.jobs.lint.directives import SIGNALS, Directives
from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.python_program import PythonProgram
from hpctrain.jobs.lint.shell import Shell, plain

__all__ = ["HOSTS_OPTION", "OF_A_TASK", "LintedScript"]

#: A variable that differs from task to task, also in arithmetic. A dollar that does not expand is
#: another character in the words of a command.
OF_A_TASK = re.compile(r"\$(?:\{|\(\([^()]*?\b)?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
#: Options with the hosts on which a launcher starts its ranks.
HOSTS_OPTION = re.compile(r" -(?:H\b|-?hosts?\b|-?hostfile\b|-host-)")
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
        self._programs: dict[str, PythonProgram] = {}
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
            or _divided(self.count("gpus"), self.count("ntasks") == 1 or self.count("nodes"))
            or (self.count("gpus-per-task") or 0) * (self.tasks_per_node or 0)
        )

    def _count_of(self, text: str) -> int | None:
        return _count(text) or (self.number(text) if "$" in text else None)

    @property
    def whole_nodes(self) -> bool:
        """Whether the job has its nodes alone, as far as its options tell.

        Several nodes with four GPUs each are whole nodes nearly everywhere, and so are eight GPUs.
        """
        many = self.gpus_per_node >= (4 if (self.count("nodes") or 1) > 1 else 8)
        return many or "exclusive" in self.options or self.value("mem").rstrip("KMGT") == "0"

    def number(self, text: str) -> int | None:
        """Return the number that a text is in the batch shell; None if it is not certain.

        Args:
            text: a number, a variable of Slurm, or a product of these.
        """
        total, each = self.tasks_of({})
        counts = {
            "NTASKS": total if {"ntasks", "ntasks-per-node"} & self.options.keys() else None,
            "NTASKS_PER_NODE": each if "ntasks-per-node" in self.options else None,
            "NNODES": self.count("nodes") if self.value("nodes").isdecimal() else None,
            "GPUS_ON_NODE": self.gpus_per_node,
        }
        counts |= {"NPROCS": counts["NTASKS"], "JOB_NUM_NODES": counts["NNODES"]}
        text = re.sub(r"\A\$\((\(|expr\b)|\)+\Z|[\s\\]", "", plain(text))
        text = re.sub(
            r"\$?\{?\bSLURM_(\w+)\b\}?", lambda name: str(counts.get(name[1]) or "?"), text
        )
        factors = text.split("*")
        certain = all(re.fullmatch("[0-9]{1,6}", one) for one in factors) and len(factors) < 9
        return math.prod(map(int, factors)) if certain else None

    def tasks_of(self, step: dict[str, str]) -> tuple[int | None, int | None]:
        """Return the number of tasks, total and on each node; None if it is not certain.

        Args:
            step: options of an srun; empty for the job.
        """
        own = {name: self._count_of(step[name]) for name in _TASKS if name in step}
        if None in own.values() or {"het-group", "multi-prog"} & step.keys():
            return None, None
        total, each, nodes = (own.get(name, self.count(name)) for name in _TASKS)
        if total and ("ntasks" in own or not own):
            return total, own.get("ntasks-per-node") or _divided(total, nodes)
        if not each and (total or not nodes or "ntasks-per-gpu" in self.options):
            return None, None
        return (each or 1) * (nodes or 1), each or 1

    def program_of(self, launch: Launch) -> PythonProgram | None:
        """Return the Python script of a launch; None if it is not certain which file that is."""
        name = launch.python_file
        if self._moves or launch.kind != "python" or launch.around or not name or "$" in name:
            return None
        if name not in self._programs:
            self._programs[name] = PythonProgram(self.folder / name)
        return self._programs[name]

    @cached_property
    def _moves(self) -> bool:
        """Whether the job changes its folder."""
        return "chdir" in self.options or any(
            one.argv[0] in ("cd", "pushd") and "SLURM_SUBMIT_DIR" not in one.text
            for one in self.launches
        )

    @cached_property
    def parallel_steps(self) -> list[Launch]:
        """The steps that have several tasks for certain."""
        return [one for one in self.steps if (self.tasks_of(one.options)[0] or 0) > 1]

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
            # A program that gets hosts starts its ranks there itself.
            by_program = HOSTS_OPTION.search(f" {one.program}")
            intended = by_program or (one.supervised and one.kind == "python")
            if one.trains and not intended and ((self.count("nodes") or 1) > 1 or ranks):
                return one
        return None


def _divided(total: int | None, nodes: int | None) -> int | None:
    return total // nodes if total and nodes and total % nodes == 0 else None


def _count(text: str) -> int | None:
    """Return the number in `4`, `2-4`, `a100:4` or `a100=4`; None if there is none."""
    match = _COUNT.match(text)
    return int(match[1]) if match else None
