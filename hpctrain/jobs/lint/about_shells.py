"""Rules on what is computed in the wrong shell: that of the batch script, or that of each task."""

import re
from collections.abc import Iterator

from hpctrain.cluster.texts import listed
from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import OF_A_TASK, LintedScript
from hpctrain.jobs.lint.shell import Command, Variable, as_in_task, plain

__all__ = ["RULES"]

# Variables that differ from task to task, each with that of Slurm.
_RANKS = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
_RANKS |= dict.fromkeys(("NODE_RANK", "GROUP_RANK"), "SLURM_NODEID")
_GPUS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "SLURM_LOCALID")
_RANK_OPTION = re.compile(r" --(?:node|machine)[-_]rank[= ]\S+")
_ADDRESSES = ("master-addr", "main-process-ip")
_PORTS = ("master-port", "main-process-port")
# An address and a port that one task computes alone.
_OWN_HOST = re.compile(r"\$\(hostname\b|\$\{?(HOSTNAME|SLURMD_NODENAME)\b")
_OWN_PORT = re.compile(r"\b(RANDOM|shuf|socket)\b")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_IN_BATCH_SHELL = "before srun, in the batch shell: export"
_HOOK = 'eval "$(conda shell.bash hook)"'
_CONDA_RUN = "type conda run --no-capture-output -n ENVIRONMENT python …"
_CONDA = ("conda", "mamba", "micromamba")
# What may define the function `conda`: modules, sourced files, hooks.
_DEFINES = frozenset(("module", "ml", "spack", "source", ".", "eval"))
_PARTS_OF_A_SHELL = ("cd", "export", "module", "ml", "source", ".")


def _ranks(script: LintedScript) -> Iterator[Found]:
    """Yield rank variables with one value for all tasks.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES; bash(1), EXPANSION.
    """
    steps = script.parallel_steps
    # torchrun gives its ranks variables of their own.
    alone = any(one.kind == "python" for one in steps)
    program = "python" if alone else "torchrun"
    given = [one[:3] for one in script.shell.variables if script.shell.exported(one.name) is one]
    given += [(one.line, *pair) for one in steps for pair in one.command.environment.items()]
    for line, name, value in given if any(one.trains for one in steps) else ():
        variable, computed = (_RANKS | _GPUS).get(name), OF_A_TASK.search(value)
        used = alone or variable == "SLURM_NODEID"
        if not variable and computed and re.fullmatch(r"\$[{(]*\w+[})]*", value):
            variable = computed[1]
            used = any(re.search(rf"\$\{{?{name}\b", plain(one.program)) for one in steps)
        if used and variable and (computed or (value.isdigit() and name in _RANKS)):
            reason = f"{name} is set once, in the batch shell, so all tasks have the same"
            fix = f"type srun bash -c '{name}=${variable} {program} …'"
            yield line, "manual-rank", reason, fix, "leave it out"
    yield from _sizes(script, [one for one in steps if one.kind == "python"])
    for step in (one for one in steps if one.by and not one.chosen):
        options = step.agent.options if step.agent else {}
        name = next((one for one in ("node-rank", "machine-rank") if one in options), "")
        several = options.get("nnodes", options.get("num-machines", "1")) not in ("1", "1:1")
        if name and options[name].isdigit() and several and _static(step):
            reason = f"--{name}={options[name]} is that of all nodes: they do not find each other"
            fix = f"type srun bash -c '… --{name}=$SLURM_NODEID …' in single quotes"
            yield step.line, "manual-rank", reason, fix


def _static(step: Launch) -> bool:
    """Whether its launcher takes the rank of a node from an option; c10d and etcd choose it."""
    options = step.agent.options if step.agent else {}
    return options.get("rdzv-backend", "static") == "static"


def _sizes(script: LintedScript, steps: list[Launch]) -> Iterator[Found]:
    """Yield a WORLD_SIZE that is not srun's."""
    value = script.shell.exported("WORLD_SIZE")
    size = script.number(value.value) or 0 if value else 0
    tasks = [[number or 1 for number in script.tasks_of(one.options)] for one in steps]
    # A task that has its node alone may start ranks of its own.
    wrong = all(size < total or (size > total and each > 1) for total, each in tasks)
    if value and size and tasks and wrong:
        reason = f"WORLD_SIZE is {size}, and srun starts another number of tasks"
        yield value.line, "manual-rank", reason, 'export WORLD_SIZE="$SLURM_NTASKS"'


def _expansions(script: LintedScript) -> Iterator[Found]:
    """Yield variables of a task that the batch shell replaces, or that no shell replaces."""
    for step in script.steps:
        text = " ".join(step.argv)
        text = text if _static(step) else _RANK_OPTION.sub("", text)
        match = OF_A_TASK.search(text) if step.by else None
        if match:
            reason = f"${match[1]} is replaced here, in the batch shell, by 0 for all tasks"
            fix = f"let each task replace it: srun bash -c '… ${match[1]} …' in single quotes"
            yield step.line, "rank-of-batch-shell", reason, fix
    # A here-document is the input of a step, or becomes a file that a step starts.
    writers = [one for one in script.launches if not one.by and _replaced(one)]
    files = {word.lstrip(">./"): one for one in writers for word in one.argv[1:] if word != ">"}
    for step in (one for one in script.parallel_steps if one.by):
        match = OF_A_TASK.search(as_in_task(step.program))
        if match and step.trains and not step.around:
            reason = f"no shell replaces ${match[1]} here: the program gets the text itself"
            fix = f"let a shell of each task replace it: srun bash -c '… ${match[1]} …'"
            yield step.line, "rank-of-batch-shell", reason, fix
        names = {word.removeprefix("./") for word in step.words if "<<" not in word}
        for one in (step, *(files[name] for name in names & files.keys())):
            if variable := _replaced(one):
                reason = f"${variable} is replaced here, in the batch shell, by 0 for all tasks"
                fix = f"type \\${variable} in the here-document"
                yield one.line, "rank-of-batch-shell", reason, fix


def _replaced(launch: Launch) -> str:
    """Return the variable of a task that the batch shell replaces in a here-document, or nothing.

    A text with #SBATCH lines is for another job.
    """
    document = launch.command.document
    match = None if "#SBATCH" in document else OF_A_TASK.search(document)
    return match[1] if match else ""


def _rendezvous(script: LintedScript) -> Iterator[Found]:
    """Yield an address or a port that each task computes for itself.

    Trainings of one task each may do that, so a rank or a size has to show that the tasks belong
    together.
    """
    for step in script.parallel_steps:
        text = step.text_in_task
        own = _OWN_HOST.search(text) or _OWN_PORT.search(text)
        if not own or not step.by or step.chosen:
            continue
        total, each = (number or 1 for number in script.tasks_of(step.options))
        launches = [Launch(one) for one in step.inside.commands if not one.conditional]
        agents = [one.agent.options for one in launches if one.agent]
        values = {one.name: one.value for one in step.inside.variables if one.sure}
        for one in launches:
            values |= one.command.environment
        sizes = [one.get("nnodes", one.get("num-machines", "1")) for one in agents]
        together = {"RANK", "WORLD_SIZE"} & values.keys() or any(size != "1" for size in sizes)
        addresses, ports = [values.get("MASTER_ADDR", "")], [values.get("MASTER_PORT", "")]
        for options in agents:
            host, _, number = options.get("rdzv-endpoint", "").rpartition(":")
            addresses += [host, *(options.get(name, "") for name in _ADDRESSES)]
            ports += [number, *(options.get(name, "") for name in _PORTS)]
        if together and total > each and any(map(_OWN_HOST.search, addresses)):
            reason = "each task takes its own host for the first: they do not find each other"
            yield step.line, "hosts-apart", reason, f"{_IN_BATCH_SHELL} MASTER_ADDR=$(hostname)"
        if together and any(map(_OWN_PORT.search, ports)):
            reason = "each task computes another port, so they do not find each other"
            fix = f"{_IN_BATCH_SHELL} MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))"
            yield step.line, "hosts-apart", reason, fix


def _not_exported(script: LintedScript) -> Iterator[Found]:
    """Yield variables that the tasks do not have, as the batch shell does not export them."""
    shell, missing = script.shell, list[Variable]()
    # A file that is sourced may export it.
    sources = any(
        one.argv[0] in ("source", ".") and not "".join(one.argv[1:2]).endswith("activate")
        for one in script.launches
    )
    if not sources and not script.opaque and any(one.kind == "python" for one in script.launches):
        # Where the name stands nowhere else, nothing can read it.
        names = (one for one in _RENDEZVOUS if len(re.findall(rf"\b{one}\b", script.text)) == 1)
        missing += filter(None, map(shell.assigned, names))
    for step in (one for one in script.steps if one.text_in_task):
        given = f"{step.options.get('export')} {script.value('export')}"
        text = f"{step.text_in_task} {given} {[*step.command.environment]}"
        for name in dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*)", step.text_in_task)):
            value = shell.assigned(name)
            # A name in capitals may come exported from the shell that calls sbatch.
            if not value or not (name.islower() or name in _RENDEZVOUS) or value.line > step.line:
                continue
            if not re.search(rf"(?<![$\w{{]){name}\b", text):
                missing.append(value)
    missing = [one for one in missing if not shell.exports(one.name)]
    if missing:
        names_text = shown(listed(list(dict.fromkeys(one.name for one in missing))))
        reason = f"the tasks get no {names_text}: the batch shell does not export what it sets"
        yield missing[0].line, "not-exported", reason, f"type export {missing[0].name}=…"


def _functions(script: LintedScript) -> Iterator[Found]:
    """Yield parts of a shell that this shell does not have, or that srun cannot start.

    A batch script is neither a login shell nor an interactive one: bash(1), INVOCATION. `conda
    activate` is a function of such shells, and bash exports none to the shells that it starts.
    """
    for step in (one for one in script.launches if one.by == "srun"):
        words = [plain(word) for word in step.words[:2]]
        if words[:1] and (words[0] in _PARTS_OF_A_SHELL or _is_activation(words)):
            reason = (
                f"srun starts programs; {words[0]} is part of a shell, and changes nothing here"
            )
            fix = f"type {shown(plain(step.program))} without srun, before the training"
            yield step.line, "shell-function", reason, fix
    first, _, _ = script.text.partition("\n")
    if "BASH_ENV" in script.text or "export -f" in script.text:
        return
    commands = [one.command for one in script.launches]
    if re.search(r"\b(ba|da)?sh( -[eux]+)?\Z", first.strip()) and (line := _activates(commands)):
        reason = "a batch script reads no ~/.bashrc, so conda activate fails, and it goes on"
        yield line, "shell-function", reason, f"type {_HOOK} before it", _CONDA_RUN
    for step in script.steps:
        contained = any(one.startswith("container") for one in (*script.options, *step.options))
        direct = step.by and step.in_shell and not step.reads_profile and not contained
        if direct and "activate" in step.text_in_task and _activates(step.inside.commands):
            reason = "the shells of the tasks do not have conda's function: conda activate fails"
            yield step.line, "shell-function", reason, f"type {_HOOK}; before it", _CONDA_RUN


def _activates(commands: list[Command]) -> int:
    """Return the line of `conda activate`; 0 if there is none, or if it may be defined."""
    for command in commands:
        if command.words[0] in _DEFINES:
            return 0
        if _is_activation(command.words) and not command.conditional:
            return command.line
    return 0


def _is_activation(words: list[str]) -> bool:
    return words[0] in _CONDA and words[1:2] == ["activate"]


#: Functions that yield what is wrong with a script.
RULES = (_expansions, _functions, _not_exported, _ranks, _rendezvous)
