"""Rules on the programs of a job: their tasks, CPUs and GPUs."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import HOSTS_OPTION, OF_A_TASK, LintedScript
from hpctrain.jobs.lint.shell import plain

__all__ = ["RULES"]

# `hpctrain run` also calls it --ntasks-per-node.
_NPROC = re.compile(r" --(?:nproc[-_]per[-_]node|ntasks-per-node)[= ]([0-9]{1,5})(?!\S)")
_GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task")
_BY_TASK = frozenset(("gpus-per-task", "gpu-bind", "ntasks-per-gpu"))
# Options and variables after which a task has more than one CPU, and those of a step.
_CPUS = frozenset(("cpus-per-task", "cpus-per-gpu", "tres-per-task"))
_CPUS_OF_JOB = frozenset(("exclusive", "mincpus", "extra-node-info")) | _CPUS
_RENDEZVOUS_OPTION = re.compile(
    r" --(?:(?:nn|node.rank|rdzv.(?:backend|endpoint)|master.)\w*[= ]\S+|standalone)"
)
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[?::1\]?)?(:.*)?\Z")
# A list of all nodes, and the login node.
_NO_NODE = re.compile(r"\$\{?SLURM_((JOB_)?NODELIST|SUBMIT_HOST)\}?(:.*)?\Z")
# An option with a rank of a loop, and one with the number of those that wait for each other.
_RANK_OPTION = re.compile(r" --?(?:\w+[-_])?rank[= ]\$(?!\{?SLURM_)")
_SIZE_OPTION = re.compile(r" --?(?:nnodes|num[-_]machines|world[-_]size)[= ](?!1 )\S")
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
    for launch in script.launches:
        # Its hosts are this one, if it gets no others: horovod.runner.launch.
        program = f" {launch.program}"
        hosts = HOSTS_OPTION.search(program) or " --config-file" in program
        if launch.by == "horovodrun" and nodes > 1 and not hosts:
            reason = f"horovodrun starts its ranks on the first of {nodes} nodes only"
            yield launch.line, "missing-srun", reason, "type exec hpctrain run SCRIPT instead"
    for launch in script.launches if gpus and not _BY_TASK & script.options.keys() else ():
        steps = launch.by in ("srun", "hpctrain run") or launch is script.lacks_srun
        tasks, nproc = script.tasks_of(launch.options)[1] if steps else None, _nproc(launch)
        # One task on a node may use all its GPUs, or stand for a rank for each of them.
        of_accelerate, processes = _of_accelerate(script, launch, gpus)
        ranks = nproc or of_accelerate
        ranks = ranks or (tasks if launch.kind in ("python", "run") and tasks != 1 else None)
        several_runs = launch.by == "srun" and launch.kind == "run" and nproc and tasks != 1
        own = {*_GPUS, *_BY_TASK} & launch.options.keys()
        if ranks and ranks != gpus and not own and not several_runs:
            option = "--nproc-per-node" if nproc else "#SBATCH --ntasks-per-node"
            reason = f"{ranks} ranks on each node, which has {gpus} GPUs"
            fix = processes if of_accelerate else f"type {option}={gpus}"
            yield launch.line, "tasks-and-gpus", reason, fix


def _nproc(launch: Launch) -> int | None:
    match = _NPROC.search(launch.program) if launch.kind in ("agent", "run") else None
    return int(match[1]) if match else None


def _of_accelerate(script: LintedScript, launch: Launch, gpus: int) -> tuple[int | None, str]:
    """Return the number of ranks of accelerate on each node, and the option to type.

    --num_processes is that of all nodes. One process on a node may use all its GPUs.
    """
    options = launch.agent.options if launch.agent and "accelerate" in launch.agent.name else {}
    total = script.number(options.get("num-processes", "")) or 0
    nodes = script.number(options.get("num-machines", "1")) or 0
    several = total > nodes > 0 and total % nodes == 0
    return total // nodes if several else None, f"type --num_processes={gpus * nodes}, that of all"


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
    agent = launch.agent
    if not agent or "accelerate" in agent.name or not agent.whole:
        return "", launch.text
    given = agent.options
    nodes = given.get("nnodes", given.get("nnode", "1"))
    apart = ""
    if "standalone" in given or nodes in ("1", "1:1"):
        apart = "srun starts torchrun on several hosts, and without --nnodes each trains alone"
    elif _LOOPBACK.match(address := given.get("rdzv-endpoint") or given.get("master-addr", "")):
        apart = "each host's torchrun searches for the others on its own host, and finds none"
    elif _NO_NODE.match(address):
        apart = f"{shown(address)} is a list of nodes or the login node, and not the first node"
    rest = plain(_RENDEZVOUS_OPTION.sub("", agent.text) + agent.program)
    return apart, f"{shown(plain(agent.name))}{_RENDEZVOUS}{shown(rest)}"


def _steps(script: LintedScript) -> Iterator[Found]:
    """Yield what is wrong with each srun, and with the training that lacks one."""
    ends = re.search(r"SLURM_(KILL_BAD_EXIT|WAIT)\b", script.text)
    own_cpus = "SRUN_CPUS_PER_TASK" in script.text
    for step in script.steps:
        total, each = (number or 1 for number in script.tasks_of(step.options))
        if total > each and not step.chosen:
            yield from _hosts_apart(script, step)
        yield from _gpu_isolation(script, step, each)
        if not step.by:
            continue
        if each > 1 and (step.kind == "agent" or (step.kind == "run" and _nproc(step))):
            name, python = ("torchrun", "python") if step.kind == "agent" else ("hpctrain run",) * 2
            reason = f"srun starts {each} times {name} on each node, each with ranks of its own"
            fix = f"type srun {python} …, without --nproc-per-node"
            yield step.line, "several-agents", reason, "type srun --ntasks-per-node=1", fix
        if step.kind == "mpi" and total > 1:
            name = step.words[0]
            reason = f"srun starts {name} {total} times, each with ranks of its own"
            fixes = (f"type {name} … without srun", f"type srun PROGRAM, without {name}")
            yield step.line, "several-agents", reason, *fixes
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
    apart, together = _torchrun(step)
    # Another training on each host may be intended, and options may come from the environment.
    intended = apart and (OF_A_TASK.search(plain(step.program)) or "PET_" in script.text)
    if apart and step.kind == "agent" and step.by and not intended:
        yield step.line, "hosts-apart", apart, f"srun … {together}"
    address = script.shell.exported("MASTER_ADDR")
    own = step.kind != "python" or "MASTER_ADDR" in step.program
    for pattern, why in (
        (_LOOPBACK, "which on each host is that host itself"),
        (_NO_NODE, "a list of nodes or the login node"),
    ):
        if address and not own and pattern.match(address.value):
            reason = f"MASTER_ADDR is {shown(address.value)}, {why}"
            yield address.line, "hosts-apart", reason, f'export MASTER_ADDR="{_FIRST_HOST}"'


def _gpu_isolation(script: LintedScript, step: Launch, each: int) -> Iterator[Found]:
    """Yield options with which NCCL reaches no other GPU, and `cuda:LOCAL_RANK` does not exist.

    With `--gpu-bind=none` each task sees all GPUs, and with `allow-task-sharing` it reaches them.
    `--gpus-per-task=1 --gpu-bind=closest` is what the guide of Frontier asks for.
    Source: srun(1), --gpus-per-task, --gpu-bind and --gres-flags.
    """
    bind = step.options.get("gpu-bind", script.value("gpu-bind"))
    single = re.match(r"(verbose,|v,)?(single|per_task|map_gpu|mask_gpu)", bind)
    own = step.options.get("gpus-per-task", script.value("gpus-per-task"))
    shares = "none" in bind or "allow-task-sharing" in (
        step.options.get("gres-flags", script.value("gres-flags"))
    )
    if not step.trains or each == 1 or shares:
        return
    closest = "closest" in bind
    if single or (own and not closest):
        options = f"--gpu-bind={shown(bind)}" if single else f"--gpus-per-task={shown(own)}"
        reason = f"with {options} a task sees only its own GPU, and NCCL reaches no other"
        fix = f"type --gpus-per-node={script.gpus_per_node or each} instead"
        yield step.line, "gpu-isolation", reason, fix, "add --gpu-bind=none"
    elif closest and not own and script.gpus_per_node > 1:
        reason = "with --gpu-bind=closest a task sees GPUs near its CPUs, perhaps no GPU LOCAL_RANK"
        yield step.line, "gpu-isolation", reason, "type --gpu-bind=none", "leave it out"


def _loops(script: LintedScript) -> Iterator[Found]:
    """Yield a loop whose steps are for the same time, and run one after another: bash(1), LISTS."""
    waits = any(one.argv[0] == "wait" and not one.command.loop for one in script.launches)
    waits = waits and not script.shell.in_background
    for launch in script.launches:
        command = launch.command
        if not command.loop or command.loop in script.shell.parallel_loops:
            continue
        total, job = script.tasks_of(launch.options)[0] or 0, script.tasks_of({})[0] or 0
        a_part = launch.by == "ssh" or (launch.by == "srun" and (total == 1 or launch.chosen_nodes))
        given = "".join(f"--{name.lower()}={text} " for name, text in command.environment.items())
        text = f" {launch.program} {given}"
        together = _RANK_OPTION.search(text) and _SIZE_OPTION.search(text)
        if a_part and together and not re.search(r"&\W*\Z| -f ", text):
            reason = "each rank of this loop waits for the others, which start only after its end"
        elif waits and a_part and launch.kind != "small" and total < job:
            reason = "the steps of this loop run one after another: wait has nothing to wait for"
        else:
            continue
        yield launch.line, "one-after-another", reason, "type & at its end, and wait after done"


#: Functions that yield what is wrong with a script.
RULES = (_job, _loops, _steps)
