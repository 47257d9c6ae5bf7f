"""Rules on the programs of a job: their hosts, tasks, CPUs and GPUs."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.about_hosts import OF_A_TASK, srun_of_agents
from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.lint_finding import LintFinding, shown
from hpctrain.jobs.lint.linted_script import LintedScript

__all__ = ["RULES"]

# `hpctrain run` also calls it --ntasks-per-node.
_NPROC = re.compile(r"--(?:nproc[-_]per[-_]node|ntasks-per-node)(?:=(.*))?\Z", re.DOTALL)


def missing_srun(script: LintedScript) -> Iterator[LintFinding]:
    """Find a training without srun, which runs once, on the first node (sbatch(1), DESCRIPTION)."""
    elsewhere = (
        any(launch.by for launch in script.commands) or script.opaque or script.heterogeneous
    )
    nodes, each, gpus = script.nodes or 1, script.tasks_per_node or 1, script.gpus_per_node or 0
    if elsewhere:
        return
    for launch in script.commands:
        # On one node torchrun is right without srun, and so is a program with its own processes.
        ranks = each > 1 and gpus == each and launch.kind == "python"
        # With `hpctrain run --once` a person says that the program starts its ranks itself.
        intended = launch.supervised and launch.kind == "python"
        if launch.trains and not intended and (nodes > 1 or ranks):
            where = f"on the first of {nodes} nodes" if nodes > 1 else f"as one of {each} tasks"
            yield LintFinding(
                launch.command.line,
                "missing-srun",
                f"this starts {shown(launch.argv[0])} {where} only: Slurm runs a batch script once",
                (
                    (srun_of_agents(script, launch),)
                    if launch.kind == "agent"
                    else (_with_srun(script, launch), *_with_run(launch))
                ),
            )
            return


def _with_srun(script: LintedScript, launch: Launch) -> str:
    srun, command = "srun --kill-on-bad-exit=1", shown(" ".join(launch.argv))
    if (script.options.number("cpus-per-task") or 1) > 1:
        srun += ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    # The batch shell would replace such a variable by 0, for all tasks.
    return f"{srun} bash -c '{command}'" if OF_A_TASK.search(command) else f"{srun} {command}"


def _with_run(launch: Launch) -> Iterator[str]:
    """Yield the line with `hpctrain run` for a plain `python SCRIPT` or `python -m MODULE`."""
    name, *arguments = launch.argv
    plain = arguments and (not arguments[0].startswith("-") or arguments[0] == "-m")
    command = shown(" ".join(arguments))
    if name == "python" and plain and not OF_A_TASK.search(command):
        yield f"exec hpctrain run {command}"


def tasks_and_gpus(script: LintedScript) -> Iterator[LintFinding]:
    """Find a number of ranks on a node that differs from its number of GPUs.

    Source: srun(1), --ntasks-per-node and --gpus-per-node.
    """
    for launch in script.commands:
        each = script.step_tasks(launch)[1] if launch.by == "srun" else None
        gpus = script.gpus_per_node
        if launch.kind == "agent":
            yield from _agents(launch, each)
            processes = _nproc(launch.program)
            if gpus and processes and processes != gpus and not _hides_gpus(script, launch):
                yield LintFinding(
                    launch.command.line,
                    "tasks-and-gpus",
                    f"{processes} processes on each node, which has {gpus} GPUs",
                    (f"type --nproc-per-node={gpus}",),
                )
        elif launch.kind == "run":
            yield from _run(script, launch, each, gpus)
        elif launch.kind == "python" and each and gpus and 1 < each != gpus:
            yield from _tasks(script, launch, each, gpus)


def _run(
    script: LintedScript, launch: Launch, each: int | None, gpus: int | None
) -> Iterator[LintFinding]:
    """Check `hpctrain run`: in a task of srun, or in the batch shell, for all hosts of the job."""
    nproc = _nproc(launch.program)
    if launch.by == "srun" and nproc and each and each > 1:
        yield LintFinding(
            launch.command.line,
            "several-agents",
            f"srun starts {each} times hpctrain run on each node, and with --nproc-per-node each "
            "starts ranks for the whole node",
            ("leave out --nproc-per-node", "type exec hpctrain run without srun"),
        )
        return
    # Without the option, one task on a node stands for one rank for each of its GPUs.
    tasks = each if launch.by == "srun" else script.tasks_per_node
    ranks = nproc or (tasks if tasks and tasks > 1 else None)
    if not ranks or not gpus or ranks == gpus or _hides_gpus(script, launch):
        return
    fix = "--nproc-per-node" if nproc else "#SBATCH --ntasks-per-node"
    yield LintFinding(
        launch.command.line,
        "tasks-and-gpus",
        f"{ranks} ranks on each node, which has {gpus} GPUs",
        (f"type {fix}={gpus}",),
    )


def _tasks(script: LintedScript, launch: Launch, each: int, gpus: int) -> Iterator[LintFinding]:
    if not _hides_gpus(script, launch):
        yield LintFinding(
            launch.command.line,
            "tasks-and-gpus",
            f"{each} tasks on each node, which has {gpus} GPUs",
            (f"type #SBATCH --ntasks-per-node={gpus}",),
        )


def _agents(launch: Launch, each: int | None) -> Iterator[LintFinding]:
    if each and each > 1:
        yield LintFinding(
            launch.command.line,
            "several-agents",
            f"srun starts {each} times torchrun on each node, and each starts ranks of its own",
            ("type #SBATCH --ntasks-per-node=1", "start python instead of torchrun"),
        )


def _hides_gpus(script: LintedScript, step: Launch) -> bool:
    """Check whether GPUs are set by task, or the step has its own GPU options."""
    names = {"gpus-per-task", "gpu-bind", "gpus", "gres", "gpus-per-node", "ntasks-per-gpu"}
    names_by_task = {"gpus-per-task", "gpu-bind", "ntasks-per-gpu"}
    set_for_job = any(script.options.get(name) for name in names_by_task)
    return set_for_job or bool(names & step.options.keys()) or script.heterogeneous


def _nproc(program: list[str]) -> int | None:
    for index, word in enumerate(program):
        match = _NPROC.match(word)
        if match:
            text = match[1] if match[1] is not None else "".join(program[index + 1 : index + 2])
            return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
    return None


def cpus_dropped(script: LintedScript) -> Iterator[LintFinding]:
    """Find steps without --cpus-per-task, which srun does not inherit from sbatch from 22.05 on.

    Source: srun(1), --cpus-per-task.
    """
    cpus = script.options.number("cpus-per-task")
    if not cpus or cpus < 2 or script.heterogeneous or script.exports("SRUN_CPUS_PER_TASK"):
        return
    for step in script.steps:
        own = {"cpus-per-task", "cpus-per-gpu", "tres-per-task"} & step.options.keys()
        inline = any(w.text.startswith("SRUN_CPUS_PER_TASK=") for w in step.command.assignments)
        if step.kind in ("python", "agent", "run", "other") and not own and not inline:
            yield LintFinding(
                step.command.line,
                "cpus-dropped",
                f"from Slurm 22.05 on srun does not take --cpus-per-task={cpus} from sbatch: "
                "tasks may get one CPU each",
                (
                    'type srun --cpus-per-task="$SLURM_CPUS_PER_TASK"',
                    "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before it",
                ),
            )


def kill_on_bad_exit(script: LintedScript) -> Iterator[LintFinding]:
    """Find steps in which tasks wait for a dead task, the default (srun(1), --kill-on-bad-exit)."""
    if script.exports("SLURM_KILL_BAD_EXIT") or script.exports("SLURM_WAIT"):
        return
    for step in script.steps:
        tasks = script.step_tasks(step)[0]
        value = step.options.get("kill-on-bad-exit")
        inline = any(w.text.startswith("SLURM_KILL_BAD_EXIT=") for w in step.command.assignments)
        if not step.trains or not tasks or tasks < 2 or "wait" in step.options or inline:
            continue
        if value is None or value == "0":
            yield LintFinding(
                step.command.line,
                "no-kill-on-bad-exit",
                f"when one of {tasks} tasks dies, the others wait for it until the time limit",
                (
                    "type srun --kill-on-bad-exit=1",
                    *(("type exec hpctrain run without srun",) if step.kind == "run" else ()),
                ),
            )


def gpu_isolation(script: LintedScript) -> Iterator[LintFinding]:
    """Find steps in which each task sees only its own GPU.

    NCCL then cannot reach the GPUs of other tasks directly, and `cuda:LOCAL_RANK` does not exist.
    With `--gpu-bind=none` each task sees all GPUs.
    Source: srun(1), --gpus-per-task and --gpu-bind.
    """
    for step in script.steps:
        each = script.step_tasks(step)[1]
        bind = step.options.get("gpu-bind", script.options.value("gpu-bind"))
        single = re.match(r"(verbose,|v,)?(single|per_task|map_gpu|mask_gpu)", bind)
        own = step.options.get("gpus-per-task", script.options.value("gpus-per-task"))
        if not step.trains or not each or each < 2 or "none" in bind or not (single or own):
            continue
        options = f"--gpu-bind={shown(bind)}" if single else f"--gpus-per-task={shown(own)}"
        yield LintFinding(
            step.command.line,
            "gpu-isolation",
            f"with {options} a task sees only its own GPU, as number 0: NCCL cannot reach the "
            "others directly, and cuda:LOCAL_RANK does not exist",
            (
                f"type --gpus-per-node={script.gpus_per_node or each} instead",
                "add --gpu-bind=none",
            ),
        )


RULES = (missing_srun, tasks_and_gpus, cpus_dropped, kill_on_bad_exit, gpu_isolation)
