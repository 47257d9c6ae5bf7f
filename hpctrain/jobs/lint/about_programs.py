"""Rules on the Python scripts that a job starts, if they can be read."""

from collections.abc import Iterator

from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript

__all__ = ["RULES"]

_GPUS_OF_STEP = frozenset(("gpus", "gpus-per-node", "gres", "gpus-per-task", "gpu-bind"))


def _idle_gpus(script: LintedScript) -> Iterator[Found]:
    """Yield a training that is one process with several GPUs, and uses one of them."""
    gpus = script.gpus_per_node
    trains = [one for one in script.launches if one.trains or (one.by and one.kind != "small")]
    # Several programs, and a choice among the GPUs, are for all of them.
    others = script.opaque or script.shell.in_background or "VISIBLE_DEVICES" in script.text
    if gpus < 2 or not trains or others:
        return
    one_task = (script.count("nodes") or 1) == (script.tasks_per_node or 1) == 1
    programs = [script.program_of(one) for one in trains]
    for one, program in zip(trains, programs, strict=True):
        total = script.tasks_of(one.options)[0] if one.by else 1
        alone = one_task and one.by in ("", "srun") and total == 1
        if not alone or _GPUS_OF_STEP & one.options.keys() or not program or not program.one_gpu:
            return
    name = shown(trains[-1].python_file)
    reason = f"one process is started, and {name} uses one of its {gpus} GPUs"
    run = f"type hpctrain run {name}, which starts a rank for each GPU"
    ranks = [run for one in programs[-1:] if one and "hpctrain" in one.modules]
    fixes = (*ranks, "type #SBATCH --gpus=1 instead")
    yield trains[-1].line, "idle-gpus", reason, *fixes


def _horovod(script: LintedScript) -> Iterator[Found]:
    """Yield Horovod under srun, which sets none of its variables.

    Horovod over MPI gets its rank from srun if that serves the same PMI: an option of srun, or a
    setting of a site whose module Horovod is.
    """
    loads = any(one.argv[0] in ("module", "ml", "spack") for one in script.launches)
    if loads or "HOROVOD_" in script.text or "SLURM_MPI_TYPE" in script.text:
        return
    for step in script.parallel_steps:
        program = script.program_of(step) if step.by and "mpi" not in step.options else None
        if program and "horovod" in program.modules and "hpctrain" not in program.modules:
            total = script.tasks_of(step.options)[0]
            reason = f"Horovod reads no variable of srun: {total} trainings of one rank each"
            fix = f"type srun hpctrain run {shown(step.python_file)}"
            mpi = "type srun --mpi=pmix …, for a Horovod with an MPI that has it"
            yield step.line, "horovod-alone", reason, fix, mpi


#: Functions that yield what is wrong with a script.
RULES = (_horovod, _idle_gpus)
