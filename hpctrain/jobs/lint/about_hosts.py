"""Rules on the hosts of a step: whether their ranks find each other, and the line that fixes it."""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.jobs.lint.bash import read
from hpctrain.jobs.lint.launches import Launch, launches
from hpctrain.jobs.lint.lint_finding import LintFinding, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.variables import Variables

__all__ = ["OF_A_TASK", "RULES", "srun_of_agents"]

#: A variable of Slurm's that differs from task to task.
OF_A_TASK = re.compile(r"\$\{?SLURM_(PROCID|LOCALID|NODEID)\b")
_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch"))
# Options of torchrun that have no value; all others have one.
_FLAGS = frozenset(
    ("standalone", "no-python", "run-path", "use-env", "virtual-local-rank", "h", "help")
)
_RENDEZVOUS_OPTIONS = frozenset(
    (
        *("nnodes", "node-rank", "standalone", "rdzv-backend", "rdzv-endpoint"),
        *("master-addr", "master-port"),
    )
)
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|::1|\[::1\])(:\d+)?\Z")
_FIRST_HOST = "$(scontrol show hostnames | head -n 1)"
_RENDEZVOUS = (
    '--nnodes="$SLURM_JOB_NUM_NODES" --rdzv-backend=c10d '
    f'--rdzv-endpoint="{_FIRST_HOST}:$((20000 + SLURM_JOB_ID % 10000))"'
)


@dataclass(frozen=True)
class _Torchrun:
    """A call of torchrun.

    Attributes:
        name: words up to its name.
        options: options of the rendezvous of its agents, by name with hyphens.
        others: all other words.
    """

    name: list[str]
    options: dict[str, str]
    others: list[str]

    @property
    def alone(self) -> bool:
        """Whether its agent does not wait for other agents."""
        return self.options.get("nnodes", "1") in ("1", "1:1") or "standalone" in self.options

    @property
    def meets_itself(self) -> bool:
        """Whether each agent searches for the others on its own host, torchrun's default."""
        address = self.options.get("rdzv-endpoint") or self.options.get("master-addr")
        return not address or bool(_LOOPBACK.match(address))

    @property
    def corrected(self) -> str:
        """Command line with which the agents of all hosts find each other."""
        return f"{shown(' '.join(self.name))} {_RENDEZVOUS} {shown(' '.join(self.others))}"


def _torchrun(argv: Sequence[str]) -> _Torchrun | None:
    """Return the torchrun in a command; None if there is none, or not all its options are known."""
    for index, word in enumerate(argv):
        module = word in _MODULES and argv[max(index - 1, 0)] == "-m"
        if module or os.path.basename(word) == "torchrun":
            return _parsed(list(argv[: index + 1]), list(argv[index + 1 :]))
    for option, text in itertools.pairwise(argv):
        if re.match(r"-[a-z]*c\Z", option):
            shell = read(text)
            for launch in launches(shell, Variables(shell)):
                if launch.kind == "agent" and not launch.by:
                    return _torchrun(launch.argv)
    return None


def _parsed(name: list[str], rest: list[str]) -> _Torchrun | None:
    options: dict[str, str] = {}
    others: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module", "--"):
        taken = [rest.pop(0)]
        option, equals, value = taken[0].partition("=")
        option = option.lstrip("-").replace("_", "-")
        # argparse takes the beginning of a name as well.
        option = "nnodes" if option.startswith("nn") else option
        if not equals and option not in _FLAGS and rest:
            value = rest.pop(0)
            taken.append(value)
        if option in _RENDEZVOUS_OPTIONS:
            options[option] = value
        else:
            others += taken
    # Else it is a variable that may hold more options, or the end of an expansion that was cut.
    if not rest or not (rest[0].startswith("-") or rest[0].endswith(".py")):
        return None
    return _Torchrun(name, options, others + rest)


def srun_of_agents(script: LintedScript, launch: Launch) -> str:
    """Return the line that starts torchrun or a similar launcher with srun on all hosts of a job.

    Args:
        script: facts of the script.
        launch: launch of kind "agent", without srun.
    """
    srun = 'srun --kill-on-bad-exit=1 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
    cpus = script.options.number("cpus-per-task")
    if cpus and cpus > 1:
        # One agent has the CPUs of all tasks of its host.
        srun += f" --cpus-per-task={cpus * (script.tasks_per_node or 1)}"
    command = shown(" ".join(launch.argv))
    if os.path.basename(launch.argv[0]) == "accelerate":
        return (
            f"{srun} bash -c 'accelerate launch --num_machines=$SLURM_JOB_NUM_NODES "
            "--machine_rank=$SLURM_NODEID --main_process_ip=FIRST_HOST --main_process_port=PORT …'"
        )
    torchrun = _torchrun(launch.argv)
    if torchrun:
        has_rendezvous = not torchrun.alone and not torchrun.meets_itself
        has_node_rank = "node-rank" in torchrun.options
        return f"{srun} {command if has_rendezvous and not has_node_rank else torchrun.corrected}"
    # Its options are not known, and may be right.
    return f"{srun} {command}, where it has {_RENDEZVOUS}"


def hosts_apart(script: LintedScript) -> Iterator[LintFinding]:
    """Find steps whose ranks on several hosts do not find each other.

    Without --nnodes an agent does not wait for others. torchrun's default address is 127.0.0.1,
    which is a different host on each host.
    Source: torch.distributed.run, Usage, and torch.distributed, Environment variable
    initialization.
    """
    for step in script.steps:
        total, each = script.step_tasks(step)
        several = (
            total and each and total > each and not {"nodelist", "relative"} & set(step.options)
        )
        # Another training on each host may be intended, and options may come from the environment.
        intended = OF_A_TASK.search(" ".join(step.program)) or "PET_" in script.text
        if not several or step.command.conditional:
            continue
        if step.kind == "python":
            yield from _address(script, step)
        elif step.kind == "agent" and not intended and (torchrun := _torchrun(step.program)):
            yield from _agents(step, torchrun)


def _agents(step: Launch, torchrun: _Torchrun) -> Iterator[LintFinding]:
    if torchrun.alone or torchrun.meets_itself:
        yield LintFinding(
            step.command.line,
            "hosts-apart",
            "srun starts torchrun on several hosts, and without --nnodes each host trains alone, "
            "and writes the same files"
            if torchrun.alone
            else "each host's torchrun searches for the others on its own host, and finds none",
            (f"srun … {torchrun.corrected}",),
        )


def _address(script: LintedScript, step: Launch) -> Iterator[LintFinding]:
    """Find a MASTER_ADDR that is a different host on each host."""
    value = script.variables.get("MASTER_ADDR")
    line, text = step.command.line, ""
    if value and "MASTER_ADDR" in script.variables.exported:
        line, text = value.line, value.text
    for word in step.command.assignments:
        name, _, inline = word.text.partition("=")
        if name == "MASTER_ADDR":
            line, text = word.line, inline
    # A program may set it anew, as bash -c 'MASTER_ADDR=…' does.
    if _LOOPBACK.match(text) and not any("MASTER_ADDR" in word for word in step.program):
        yield LintFinding(
            line,
            "hosts-apart",
            f"MASTER_ADDR is {shown(text)}, which on each host is that host itself: its ranks do "
            "not find those of the others",
            (f'export MASTER_ADDR="{_FIRST_HOST}"',),
        )


RULES = (hosts_apart,)
