"""Rules on what is computed in the wrong shell: that of the batch script, or that of each task."""

from collections.abc import Iterator

from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import OF_A_TASK, LintedScript

__all__ = ["RULES"]

# Variables that differ from task to task, each with that of Slurm.
_RANKS = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
_RANKS |= dict.fromkeys(("NODE_RANK", "GROUP_RANK"), "SLURM_NODEID")


def _ranks(script: LintedScript) -> Iterator[Found]:
    """Yield rank variables with one value for all tasks.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES; bash(1), EXPANSION.
    """
    steps = [one for one in script.steps if (script.tasks_of(one.options)[0] or 0) > 1]
    # torchrun gives its ranks variables of their own.
    alone = any(one.kind == "python" for one in steps)
    for name, variable in _RANKS.items() if any(one.trains for one in steps) else ():
        value = script.shell.exported(name) if alone or variable == "SLURM_NODEID" else None
        if value and (value.value.isdigit() or OF_A_TASK.search(value.value)):
            reason = f"{name} is set once, in the batch shell, so all tasks have the same"
            program = "python" if alone else "torchrun"
            fix = f"type srun bash -c '{name}=${variable} {program} …'"
            yield value.line, "manual-rank", reason, fix, "leave it out"
    size = script.shell.exported("WORLD_SIZE") if alone else None
    sizes = {script.tasks_of(one.options)[0] for one in steps}
    if size and size.value.isdecimal() and int(size.value) not in sizes:
        reason = f"WORLD_SIZE is {shown(size.value)}, and srun starts another number of tasks"
        yield size.line, "manual-rank", reason, 'export WORLD_SIZE="$SLURM_NTASKS"'
    for step in steps:
        match = OF_A_TASK.search(" ".join(step.argv)) if step.by else None
        if match:
            reason = f"${match[1]} is replaced here, in the batch shell, by 0 for all tasks"
            fix = f"let each task replace it: srun bash -c '… ${match[1]} …' in single quotes"
            yield step.line, "rank-of-batch-shell", reason, fix


#: Functions that yield what is wrong with a script.
RULES = (_ranks,)
