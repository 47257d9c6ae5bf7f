"""Rules on the programs of a job: their tasks, CPUs and GPUs."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import OF_A_TASK, LintedScript
from hpctrain.jobs.lint.shell import plain

__all__ = ["RULES"]

# `hpctrain run` also calls it --ntasks-per-node.
_NPROC = re.compile(r" --(?:nproc[-_]per[-_]node|ntasks-per-node)[= ]([0-9]{1,5})(?!\S)")
_GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task")
_BY_TASK = frozenset(("gpus-per-task", "gpu-bind", "ntasks-per-gpu"))
# Options and variables after which a task has more than one CPU, and those of a step.
_CPUS = frozenset(("cpus-per-task", "cpus-per-gpu", "tres-per-task"))
_CPUS_OF_JOB = frozenset(("exclusive", "mincpus", "extra-node-info")) | _CPUS
# torchrun with its own options, up to the program that it starts.
_NAME = (
    r"(?P<name>(?:python\S* (?:-\S+ )*-m )?[\w/.$-]*(?:torchrun|torch.distributed.(?:run|launch)))"
)
_TORCHRUN = re.compile(_NAME + r"(?P<options>.*?)(?P<program> (?:-m \S+|\S+\.py\b).*)", re.DOTALL)
_OPTION = re.compile(r" --?([\w-]+)(?:(?:=| (?!-))(\S+))?")
_RENDEZVOUS_OPTION = re.compile(
    r" --(?:(?:nn|node.rank|rdzv.(?:backend|endpoint)|master.)\w*[= ]\S+|standalone)"
)
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[?::1\]?)?(:.*)?\Z")
_FIRST_HOST = "$(scontrol show hostnames | head -n 1)"
_RENDEZVOUS = (
    ' --nnodes="$SLURM_JOB_NUM_NODES" --rdzv-backend=c10d '
    f'--rdzv-endpoint="{_FIRST_HOST}:$((20000 + SLURM_JOB_ID % 10000))"'
)
_ACCELERATE = (
    "bash -c 'accelerate launch --num_machines=$SLURM_JOB_NUM_NODES "
    "--machine_rank=$SLURM_NODEID --main_process_ip=FIRST_HOST --main_process_port=PORT …'"
)
_OWN_CPUS = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'


def _job(script: LintedScript) -> Iterator[Found]:
    """Yield a training without srun, and numbers of ranks and CPUs that do not fit the GPUs.

    Source: sbatch(1), DESCRIPTION; srun(1), --ntasks-per-node and --gpus-per-node.
    """
    gpus, each, nodes = script.gpus_per_node, script.tasks_per_node or 1, script.count("nodes") or 1
    trains = [one for one in script.launches if one.trains]
    given = script.options.keys() | {name for one in trains for name in one.options}
    # Slurm gives each task one CPU, if the partition has no other default. In a script of `hpctrain
    # render` that default is what a person left to the cluster.
    left_out = "HPCTRAIN_SITE" not in script.text and not given & _CPUS_OF_JOB
    cpus = script.count("cpus-per-task")
    if trains and each <= gpus > 1 and left_out:
        cpus = 8 * gpus // each
        line = max(script.options[name].line for name in _GPUS if name in script.options)
        reason = f"Slurm gives each task one CPU, so a node's {gpus} GPUs wait for their data"
        fix = f"type #SBATCH --cpus-per-task={cpus} (cores of a node / its tasks)"
        fix += f", and srun {_OWN_CPUS}" if script.steps else ""
        yield line, "missing-cpus", reason, fix
    if launch := script.lacks_srun:
        where = f"on the first of {nodes} nodes" if nodes > 1 else f"as one of {each} tasks"
        reason = f"this starts {where} only: Slurm runs a batch script once"
        yield launch.line, "missing-srun", reason, *_with_srun(launch, cpus, each)
    for launch in script.launches if gpus and not _BY_TASK & script.options.keys() else ():
        steps = launch.by in ("srun", "hpctrain run") or launch is script.lacks_srun
        tasks, nproc = script.tasks_of(launch.options)[1] if steps else None, _nproc(launch)
        # One task on a node may use all its GPUs, or stand for a rank for each of them.
        ranks = nproc or (tasks if launch.kind in ("python", "run") and tasks != 1 else None)
        several_runs = launch.by == "srun" and launch.kind == "run" and nproc and tasks != 1
        own = {*_GPUS, *_BY_TASK} & launch.options.keys()
        if ranks and ranks != gpus and not own and not several_runs:
            option = "--nproc-per-node" if nproc else "#SBATCH --ntasks-per-node"
            reason = f"{ranks} ranks on each node, which has {gpus} GPUs"
            yield launch.line, "tasks-and-gpus", reason, f"type {option}={gpus}"


def _nproc(launch: Launch) -> int | None:
    match = _NPROC.search(launch.program) if launch.kind in ("agent", "run") else None
    return int(match[1]) if match else None


def _with_srun(launch: Launch, cpus: int | None, each: int) -> tuple[str, ...]:
    """Return the lines that start a program on all nodes, with CPUs and tasks of each node."""
    srun, command = "srun --kill-on-bad-exit=1", launch.text
    if launch.kind != "agent":
        srun += f" {_OWN_CPUS}" if cpus else ""
        # The batch shell would replace such a variable by 0, for all tasks.
        command = f"bash -c '{command}'" if OF_A_TASK.search(command) else command
        run = re.sub(r"^python (?!-)|^python (?=-m )", "exec hpctrain run ", command)
        return (f"{srun} {command}", *([run] if run != command else []))
    srun += ' --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
    # One agent has the CPUs of all tasks of its host.
    srun += f" --cpus-per-task={cpus * each}" if cpus else ""
    if command.startswith("accelerate"):
        return (f"{srun} {_ACCELERATE}",)
    apart, together = _torchrun(launch)
    return (f"{srun} {together if apart or '--node-rank' in command else command}",)


def _torchrun(launch: Launch) -> tuple[str, str]:
    """Return why the agents of torchrun do not find each other, and the command with which they do.

    The first is empty if they find each other, or if that is not certain.
    """
    match = _TORCHRUN.search(launch.program)
    if not match or "$" in _OPTION.sub("", match["options"]):
        return "", launch.text
    given = {name.replace("_", "-"): value for name, value in _OPTION.findall(match["options"])}
    nodes = given.get("nnodes", given.get("nnode", "1"))
    apart = ""
    if "standalone" in given or nodes in ("1", "1:1"):
        apart = "srun starts torchrun on several hosts, and without --nnodes each trains alone"
    elif _LOOPBACK.match(given.get("rdzv-endpoint") or given.get("master-addr", "")):
        apart = "each host's torchrun searches for the others on its own host, and finds none"
    rest = plain(_RENDEZVOUS_OPTION.sub("", match["options"]) + match["program"])
    return apart, f"{shown(plain(match['name']))}{_RENDEZVOUS}{shown(rest)}"


def _steps(script: LintedScript) -> Iterator[Found]:
    """Yield what is wrong with each srun, and with the training that lacks one."""
    ends = re.search(r"SLURM_(KILL_BAD_EXIT|WAIT)\b", script.text)
    own_cpus = "SRUN_CPUS_PER_TASK" in script.text
    for step in script.steps:
        total, each = (number or 1 for number in script.tasks_of(step.options))
        chosen = {"nodelist", "relative"} & step.options.keys() or step.command.conditional
        if total > each and not chosen:
            yield from _hosts_apart(script, step)
        yield from _gpu_isolation(script, step, each)
        if not step.by:
            continue
        if each > 1 and (step.kind == "agent" or (step.kind == "run" and _nproc(step))):
            name, python = ("torchrun", "python") if step.kind == "agent" else ("hpctrain run",) * 2
            reason = f"srun starts {each} times {name} on each node, each with ranks of its own"
            fix = f"type srun {python} …, without --nproc-per-node"
            yield step.line, "several-agents", reason, "type srun --ntasks-per-node=1", fix
        # From 22.05 on: srun(1), --cpus-per-task.
        cpus = script.count("cpus-per-task") or 1
        works = step.kind not in ("small", "unknown")
        if cpus > 1 and works and not own_cpus and not _CPUS & step.options.keys():
            reason = f"from Slurm 22.05 on srun does not take --cpus-per-task={cpus} from sbatch"
            fix = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before it"
            yield step.line, "cpus-dropped", reason, f"type srun {_OWN_CPUS}", fix
        # The default: srun(1), --kill-on-bad-exit.
        waits = step.options.get("kill-on-bad-exit", "0") == "0" and "wait" not in step.options
        if step.trains and total > 1 and waits and not ends:
            reason = f"when one of {total} tasks dies, the others wait for it until the time limit"
            run = ("type exec hpctrain run without srun",) if step.kind == "run" else ()
            yield step.line, "no-kill-on-bad-exit", reason, "type srun --kill-on-bad-exit=1", *run


def _hosts_apart(script: LintedScript, step: Launch) -> Iterator[Found]:
    """Yield why the ranks of several hosts do not find each other.

    Without --nnodes an agent does not wait for others. torchrun's default address is 127.0.0.1,
    which is a different host on each host.
    Source: torch.distributed.run, Usage, and torch.distributed, Environment variable
    initialization.
    """
    # Another training on each host may be intended, and options may come from the environment.
    intended = OF_A_TASK.search(plain(step.program)) or "PET_" in script.text
    apart, together = _torchrun(step)
    if apart and step.kind == "agent" and step.by and not intended:
        yield step.line, "hosts-apart", apart, f"srun … {together}"
    address = script.shell.exported("MASTER_ADDR")
    own = step.kind != "python" or "MASTER_ADDR" in step.program
    if address and not own and _LOOPBACK.match(address.value):
        reason = f"MASTER_ADDR is {shown(address.value)}, which on each host is that host itself"
        yield address.line, "hosts-apart", reason, f'export MASTER_ADDR="{_FIRST_HOST}"'


def _gpu_isolation(script: LintedScript, step: Launch, each: int) -> Iterator[Found]:
    """Yield options with which NCCL reaches no other GPU, and `cuda:LOCAL_RANK` does not exist.

    With `--gpu-bind=none` each task sees all GPUs.
    Source: srun(1), --gpus-per-task and --gpu-bind.
    """
    bind = step.options.get("gpu-bind", script.value("gpu-bind"))
    single = re.match(r"(verbose,|v,)?(single|per_task|map_gpu|mask_gpu)", bind)
    own = step.options.get("gpus-per-task", script.value("gpus-per-task"))
    if step.trains and each > 1 and "none" not in bind and (single or own):
        options = f"--gpu-bind={shown(bind)}" if single else f"--gpus-per-task={shown(own)}"
        reason = f"with {options} a task sees only its own GPU, and NCCL reaches no other"
        fix = f"type --gpus-per-node={script.gpus_per_node or each} instead"
        yield step.line, "gpu-isolation", reason, fix, "add --gpu-bind=none"


#: Functions that yield what is wrong with a script.
RULES = (_job, _steps)
