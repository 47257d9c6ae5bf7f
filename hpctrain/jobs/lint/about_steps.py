"""Rules on the programs of a job: their tasks, CPUs and GPUs."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.shell import plain

# `hpctrain run` also calls it --ntasks-per-node.
_NPROC = re.compile(r" --(?:nproc[-_]per[-_]node|ntasks-per-node)[= ](\d{1,5})(?!\S)", re.ASCII)
_GPUS_BY_TASK = ("gpus-per-task", "gpu-bind", "ntasks-per-gpu")
# A variable of Slurm's that differs from task to task, in the text of a program.
_OF_A_TASK = re.compile(r"\$\{?SLURM_(PROCID|LOCALID|NODEID)\b")
# torchrun with all its options, if no variable among them may hold more of them.
_TORCHRUN = re.compile(
    r"(?P<name>(?:python\S* (?:-\S+ )*-m )?[\w/.$-]{0,99}"
    r"(?:torchrun|torch\.distributed\.(?:run|launch)))"
    r"(?P<options>(?: --?[\w-]+(?:=\S+| (?!-|\S+\.py)\S+)?)*?)(?P<program> (?:-m \S+|\S+\.py\b).*)",
    re.DOTALL,
)
_RENDEZVOUS_OPTION = re.compile(
    r" --(?:nn\w*|node[-_]rank|rdzv[-_]backend|rdzv[-_]endpoint|master[-_]addr|master[-_]port)"
    r"[= ](?P<value>\S+)| --standalone"
)
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|::1|\[::1\])(:\d+)?\Z")
_FIRST_HOST = "$(scontrol show hostnames | head -n 1)"
_RENDEZVOUS = (
    '--nnodes="$SLURM_JOB_NUM_NODES" --rdzv-backend=c10d '
    f'--rdzv-endpoint="{_FIRST_HOST}:$((20000 + SLURM_JOB_ID % 10000))"'
)


def missing_srun(script: LintedScript) -> Iterator[Found]:
    """Find a training without srun, which runs once, on the first node (sbatch(1), DESCRIPTION)."""
    if any(one.by for one in script.commands) or script.opaque or script.heterogeneous:
        return
    nodes, each = script.nodes or 1, script.tasks[1] or 1
    for launch in script.commands:
        # On one node torchrun is right without srun, and so is a program with its own processes.
        ranks = each > 1 and script.gpus_per_node == each and launch.kind == "python"
        # With `hpctrain run --once` a person says that the program starts its ranks itself.
        intended = launch.supervised and launch.kind == "python"
        if launch.trains and not intended and (nodes > 1 or ranks):
            where = f"on the first of {nodes} nodes" if nodes > 1 else f"as one of {each} tasks"
            reason = f"this starts {where} only: Slurm runs a batch script once"
            yield launch.line, reason, *_with_srun(script, launch)
            return


def _with_srun(script: LintedScript, launch: Launch) -> tuple[str, ...]:
    """Return the lines that start a program on all nodes."""
    if launch.kind == "agent":
        return (_srun_of_agents(script, launch),)
    srun, command = "srun --kill-on-bad-exit=1", launch.text
    if (script.options.number("cpus-per-task") or 1) > 1:
        srun += ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    if _OF_A_TASK.search(command):
        # The batch shell would replace such a variable by 0, for all tasks.
        return (f"{srun} bash -c '{command}'",)
    plain_python = re.match(r"python ((?!-)|(?=-m ))", command)
    run = (f"exec hpctrain run {command[plain_python.end() :]}",) if plain_python else ()
    return (f"{srun} {command}", *run)


def _srun_of_agents(script: LintedScript, launch: Launch) -> str:
    """Return the line that starts torchrun or a similar launcher with srun on all hosts."""
    srun = 'srun --kill-on-bad-exit=1 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
    cpus = script.options.number("cpus-per-task") or 1
    if cpus > 1:
        # One agent has the CPUs of all tasks of its host.
        srun += f" --cpus-per-task={cpus * (script.tasks[1] or 1)}"
    if launch.text.startswith("accelerate"):
        return (
            f"{srun} bash -c 'accelerate launch --num_machines=$SLURM_JOB_NUM_NODES "
            "--machine_rank=$SLURM_NODEID --main_process_ip=FIRST_HOST --main_process_port=PORT …'"
        )
    apart, corrected = _torchrun(launch)
    if apart or (corrected and "node-rank" in launch.text):
        return f"{srun} {corrected}"
    # If its options are not known, they may be right.
    return f"{srun} {launch.text}" + ("" if corrected else f", where it has {_RENDEZVOUS}")


def _torchrun(launch: Launch) -> tuple[str, str]:
    """Return why the agents of torchrun are apart, and the command with which they are not.

    Returns:
        The first is empty if they find each other; both are empty if not all options are known.
    """
    match = _TORCHRUN.search(" ".join(launch.program))
    if not match:
        return "", ""
    options = {
        one[0].split("=")[0].split()[0].replace("_", "-"): one["value"] or ""
        for one in _RENDEZVOUS_OPTION.finditer(match["options"])
    }
    nodes = [value for name, value in options.items() if name.startswith("--nn")]
    address = options.get("--rdzv-endpoint") or options.get("--master-addr")
    others = _RENDEZVOUS_OPTION.sub("", match["options"]) + match["program"]
    corrected = f"{shown(plain(match['name']))} {_RENDEZVOUS} {shown(plain(others).strip())}"
    apart = ""
    if "--standalone" in options or {*nodes} <= {"1", "1:1"}:
        apart = "srun starts torchrun on several hosts, and without --nnodes each trains alone"
    elif not address or _LOOPBACK.match(address):
        apart = "each host's torchrun searches for the others on its own host, and finds none"
    return apart, corrected


def hosts_apart(script: LintedScript) -> Iterator[Found]:
    """Find steps whose ranks on several hosts do not find each other.

    Without --nnodes an agent does not wait for others. torchrun's default address is 127.0.0.1,
    which is a different host on each host.
    Source: torch.distributed.run, Usage, and torch.distributed, Environment variable
    initialization.
    """
    for step in script.steps:
        total, each = script.step_tasks(step)
        chosen = {"nodelist", "relative"} & step.options.keys()
        if not total or not each or total <= each or chosen or step.command.conditional:
            continue
        program = plain(" ".join(step.program))
        # Another training on each host may be intended, and options may come from the environment.
        intended = _OF_A_TASK.search(program) or "PET_" in script.text
        if step.kind == "python" and "MASTER_ADDR" not in program:
            yield from _address(script, step)
        elif step.kind == "agent" and not intended:
            apart, corrected = _torchrun(step)
            if apart:
                yield step.line, apart, f"srun … {corrected}"


def _address(script: LintedScript, step: Launch) -> Iterator[Found]:
    """Find a MASTER_ADDR that is a different host on each host."""
    address = script.shell.get("MASTER_ADDR")
    line, text = step.line, step.command.inline.get("MASTER_ADDR", "")
    if not text and address and script.exports("MASTER_ADDR"):
        line, text = address.line, address.value
    if _LOOPBACK.match(text):
        reason = f"MASTER_ADDR is {shown(text)}, which on each host is that host itself"
        yield line, reason, f'export MASTER_ADDR="{_FIRST_HOST}"'


def several_agents(script: LintedScript) -> Iterator[Found]:
    """Find an srun that starts several launchers on a node, each for all ranks of the node."""
    for step in script.steps:
        each = script.step_tasks(step)[1] or 1
        if step.kind == "agent" and each > 1:
            reason = f"srun starts {each} times torchrun on each node, each with ranks of its own"
            fix = "start python instead of torchrun"
            yield step.line, reason, "type #SBATCH --ntasks-per-node=1", fix
        elif step.kind == "run" and each > 1 and _nproc(step):
            reason = f"srun starts {each} times hpctrain run on each node, each with all its ranks"
            fix = "type exec hpctrain run without srun"
            yield step.line, reason, "leave out --nproc-per-node", fix


def tasks_and_gpus(script: LintedScript) -> Iterator[Found]:
    """Find a number of ranks on a node that differs from its number of GPUs.

    Source: srun(1), --ntasks-per-node and --gpus-per-node.
    """
    gpus = script.gpus_per_node
    if not gpus or script.heterogeneous or any(script.options.get(one) for one in _GPUS_BY_TASK):
        return
    own = {*_GPUS_BY_TASK, "gpus", "gres", "gpus-per-node"}
    for launch in script.commands:
        tasks = script.step_tasks(launch)[1] if launch.by == "srun" else None
        if launch.by == "hpctrain run":
            tasks = script.tasks[1]
        nproc = _nproc(launch) if launch.kind in ("agent", "run") else None
        # One task on a node may use all its GPUs, or stand for a rank for each of them.
        ranks = nproc or (tasks if launch.kind in ("python", "run") and tasks != 1 else None)
        several_runs = launch.by == "srun" and launch.kind == "run" and nproc and tasks != 1
        if not ranks or ranks == gpus or own & launch.options.keys() or several_runs:
            continue
        option = "--nproc-per-node" if nproc else "#SBATCH --ntasks-per-node"
        reason = f"{ranks} ranks on each node, which has {gpus} GPUs"
        yield launch.line, reason, f"type {option}={gpus}"


def _nproc(launch: Launch) -> int | None:
    match = _NPROC.search(plain(" ".join(launch.program)))
    return int(match[1]) if match else None


def cpus_dropped(script: LintedScript) -> Iterator[Found]:
    """Find steps without --cpus-per-task, which srun does not inherit from sbatch from 22.05 on.

    Source: srun(1), --cpus-per-task.
    """
    cpus = script.options.number("cpus-per-task") or 1
    if cpus < 2 or script.heterogeneous or script.exports("SRUN_CPUS_PER_TASK"):
        return
    for step in script.steps:
        own = {"cpus-per-task", "cpus-per-gpu", "tres-per-task"} & step.options.keys()
        works = step.kind in ("python", "agent", "run", "other")
        if works and not own and "SRUN_CPUS_PER_TASK" not in step.command.inline:
            reason = f"from Slurm 22.05 on srun does not take --cpus-per-task={cpus} from sbatch"
            fix = 'type srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
            yield step.line, reason, fix, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before it"


def no_kill_on_bad_exit(script: LintedScript) -> Iterator[Found]:
    """Find steps in which tasks wait for a dead task, the default (srun(1), --kill-on-bad-exit)."""
    if script.exports("SLURM_KILL_BAD_EXIT") or script.exports("SLURM_WAIT"):
        return
    for step in script.steps:
        tasks = script.step_tasks(step)[0] or 1
        waits = step.options.get("kill-on-bad-exit", "0") == "0" and "wait" not in step.options
        inline = "SLURM_KILL_BAD_EXIT" in step.command.inline
        if step.trains and tasks > 1 and waits and not inline:
            reason = f"when one of {tasks} tasks dies, the others wait for it until the time limit"
            fixes = ("type exec hpctrain run without srun",) if step.kind == "run" else ()
            yield step.line, reason, "type srun --kill-on-bad-exit=1", *fixes


def gpu_isolation(script: LintedScript) -> Iterator[Found]:
    """Find steps in which each task sees only its own GPU.

    NCCL then cannot reach the GPUs of other tasks directly, and `cuda:LOCAL_RANK` does not exist.
    With `--gpu-bind=none` each task sees all GPUs.
    Source: srun(1), --gpus-per-task and --gpu-bind.
    """
    for step in script.steps:
        each = script.step_tasks(step)[1] or 1
        bind = step.options.get("gpu-bind", script.options.value("gpu-bind"))
        single = re.match(r"(verbose,|v,)?(single|per_task|map_gpu|mask_gpu)", bind)
        own = step.options.get("gpus-per-task", script.options.value("gpus-per-task"))
        if step.trains and each > 1 and "none" not in bind and (single or own):
            options = f"--gpu-bind={shown(bind)}" if single else f"--gpus-per-task={shown(own)}"
            reason = f"with {options} a task sees only its own GPU, and NCCL reaches no other"
            fix = f"type --gpus-per-node={script.gpus_per_node or each} instead"
            yield step.line, reason, fix, "add --gpu-bind=none"
