"""Rules on the programs of a job: their hosts, tasks, CPUs and GPUs."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.about_hosts import OF_A_TASK, srun_of_agents
from hpctrain.jobs.lint.findings import Finding, shown
from hpctrain.jobs.lint.job import Job
from hpctrain.jobs.lint.launches import Launch

__all__ = ["RULES"]

_NPROC = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?\Z", re.DOTALL)


def missing_srun(job: Job) -> Iterator[Finding]:
    """Find a training without srun, which runs once, on the first node (sbatch(1), DESCRIPTION)."""
    elsewhere = any(one.by for one in job.commands) or job.opaque or job.heterogeneous
    nodes, each, gpus = job.nodes or 1, job.tasks_per_node or 1, job.gpus_per_node or 0
    if elsewhere:
        return
    for one in job.commands:
        # On one node torchrun is right without srun, and so is a program with its own processes.
        ranks = each > 1 and gpus == each and one.kind == "python"
        if one.trains and (nodes > 1 or ranks):
            where = f"on the first of {nodes} nodes" if nodes > 1 else f"as one of {each} tasks"
            yield Finding(
                one.command.line,
                "missing-srun",
                f"this starts {shown(one.argv[0])} {where} only: Slurm runs a batch script once",
                (srun_of_agents(job, one) if one.kind == "agent" else _with_srun(job, one),),
            )
            return


def _with_srun(job: Job, one: Launch) -> str:
    srun, command = "srun --kill-on-bad-exit=1", shown(" ".join(one.argv))
    if (job.options.number("cpus-per-task") or 1) > 1:
        srun += ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    # The batch shell would replace such a variable by 0, for all tasks.
    return f"{srun} bash -c '{command}'" if OF_A_TASK.search(command) else f"{srun} {command}"


def tasks_and_gpus(job: Job) -> Iterator[Finding]:
    """Find a number of ranks on a node that differs from its number of GPUs.

    Source: srun(1), --ntasks-per-node and --gpus-per-node.
    """
    for one in job.commands:
        each = job.step_tasks(one)[1] if one.by == "srun" else None
        gpus = job.gpus_per_node
        if one.kind == "agent":
            yield from _agents(one, each)
            wanted = _nproc(one.program)
            if gpus and wanted and wanted != gpus and not _hides_gpus(job, one):
                yield Finding(
                    one.command.line,
                    "tasks-and-gpus",
                    f"{wanted} processes on each node, which has {gpus} GPUs",
                    (f"type --nproc-per-node={gpus}",),
                )
        elif one.kind == "python" and each and gpus and 1 < each != gpus:
            yield from _tasks(job, one, each, gpus)


def _tasks(job: Job, one: Launch, each: int, gpus: int) -> Iterator[Finding]:
    if not _hides_gpus(job, one):
        yield Finding(
            one.command.line,
            "tasks-and-gpus",
            f"{each} tasks on each node, which has {gpus} GPUs",
            (f"type #SBATCH --ntasks-per-node={gpus}",),
        )


def _agents(one: Launch, each: int | None) -> Iterator[Finding]:
    if each and each > 1:
        yield Finding(
            one.command.line,
            "several-agents",
            f"srun starts {each} times torchrun on each node, and each starts ranks of its own",
            ("type #SBATCH --ntasks-per-node=1", "start python instead of torchrun"),
        )


def _hides_gpus(job: Job, step: Launch) -> bool:
    """Check whether GPUs are set by task, or the step has its own GPU options."""
    names = {"gpus-per-task", "gpu-bind", "gpus", "gres", "gpus-per-node", "ntasks-per-gpu"}
    own = {"gpus-per-task", "gpu-bind", "ntasks-per-gpu"}
    asked = any(job.options.get(name) for name in own)
    return asked or bool(names & step.options.keys()) or job.heterogeneous


def _nproc(program: list[str]) -> int | None:
    for index, word in enumerate(program):
        match = _NPROC.match(word)
        if match:
            text = match[1] if match[1] is not None else "".join(program[index + 1 : index + 2])
            return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
    return None


def cpus_dropped(job: Job) -> Iterator[Finding]:
    """Find steps without --cpus-per-task, which srun does not inherit from sbatch from 22.05 on.

    Source: srun(1), --cpus-per-task.
    """
    asked = job.options.number("cpus-per-task")
    if not asked or asked < 2 or job.heterogeneous or job.exports("SRUN_CPUS_PER_TASK"):
        return
    for one in job.steps:
        own = {"cpus-per-task", "cpus-per-gpu", "tres-per-task"} & one.options.keys()
        inline = any(w.text.startswith("SRUN_CPUS_PER_TASK=") for w in one.command.assignments)
        if one.kind in ("python", "agent", "other") and not own and not inline:
            yield Finding(
                one.command.line,
                "cpus-dropped",
                f"from Slurm 22.05 on srun does not take --cpus-per-task={asked} from sbatch: "
                "tasks may get one CPU each",
                (
                    'type srun --cpus-per-task="$SLURM_CPUS_PER_TASK"',
                    "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before it",
                ),
            )


def kill_on_bad_exit(job: Job) -> Iterator[Finding]:
    """Find steps in which tasks wait for a dead task, the default (srun(1), --kill-on-bad-exit)."""
    if job.exports("SLURM_KILL_BAD_EXIT") or job.exports("SLURM_WAIT"):
        return
    for one in job.steps:
        tasks = job.step_tasks(one)[0]
        asked = one.options.get("kill-on-bad-exit")
        inline = any(w.text.startswith("SLURM_KILL_BAD_EXIT=") for w in one.command.assignments)
        if not one.trains or not tasks or tasks < 2 or "wait" in one.options or inline:
            continue
        if asked is None or asked == "0":
            yield Finding(
                one.command.line,
                "no-kill-on-bad-exit",
                f"when one of {tasks} tasks dies, the others wait for it, as long as the job may "
                "run",
                ("type srun --kill-on-bad-exit=1",),
            )


def gpu_isolation(job: Job) -> Iterator[Finding]:
    """Find steps in which each task sees only its own GPU.

    NCCL then cannot reach the GPUs of other tasks directly, and `cuda:LOCAL_RANK` does not exist.
    With `--gpu-bind=none` each task sees all GPUs.
    Source: srun(1), --gpus-per-task and --gpu-bind.
    """
    for one in job.steps:
        each = job.step_tasks(one)[1]
        bind = one.options.get("gpu-bind", job.options.value("gpu-bind"))
        single = re.match(r"(verbose,|v,)?(single|per_task|map_gpu|mask_gpu)", bind)
        own = one.options.get("gpus-per-task", job.options.value("gpus-per-task"))
        if not one.trains or not each or each < 2 or "none" in bind or not (single or own):
            continue
        given = f"--gpu-bind={shown(bind)}" if single else f"--gpus-per-task={shown(own)}"
        yield Finding(
            one.command.line,
            "gpu-isolation",
            f"with {given} a task sees its own GPU alone, as number 0: NCCL cannot reach the "
            "others directly, and cuda:LOCAL_RANK is not there",
            (
                f"type --gpus-per-node={job.gpus_per_node or each} in its place",
                "add --gpu-bind=none",
            ),
        )


RULES = (missing_srun, tasks_and_gpus, cpus_dropped, kill_on_bad_exit, gpu_isolation)
