"""Rules on quotes, variables and paths: the environment of tasks, the path of the script."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.shell import Assignment, plain

# Variables of Slurm's that differ from task to task. A dollar that does not expand is another
# character in the words of a command.
_OF_A_TASK = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
_OWN_PATH = re.compile(r"\$\{?[!#]?(0|BASH_SOURCE)\b")
_NODE_RANKS = ("NODE_RANK", "GROUP_RANK")
_RANKS = ("RANK", "LOCAL_RANK", *_NODE_RANKS)
_SECRET = re.compile(r"(\w*(PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|ACCESS_KEY))\Z")
_PLACEHOLDER = re.compile(
    r"<|/|~|\.\.\.|x{3,}|true\Z|false\Z|none\Z|your|my|change|\*{3}|here", re.IGNORECASE
)
_CLEARS_SLURM = re.compile(r"unset\b.*SLURM|env\s+(-i|-u\s*S(LURM|BATCH)_)|\$\{!SLURM_?[@*]")
# Commands for which the path of the spooled script is harmless.
_HARMLESS_COMMANDS = frozenset(
    ("echo", "printf", "logger", "basename", "[", "[[", "test", "case", "trap", "sbatch")
)


def _exported(script: LintedScript, name: str) -> Assignment | None:
    return script.shell.get(name) if script.exports(name) else None


def open_quote(script: LintedScript) -> Iterator[Found]:
    """Find a quote that is not closed, at which bash ends with an error (bash(1), QUOTING)."""
    # Here-documents in $(…), and quotes with a backslash in them, are not looked at.
    certain = "<<" not in script.text and "$'" not in script.text
    if script.shell.open_quote and certain:
        reason = "this quote is not closed, and bash ends here with an error"
        yield script.shell.open_quote, reason, "type the other quote", "shellcheck SCRIPT"


def export_none(script: LintedScript) -> Iterator[Found]:
    """Find steps that inherit --export=NONE, as SLURM_EXPORT_ENV is not set (sbatch(1))."""
    option = script.options.get("export")
    if not option or option.value.upper() not in ("NONE", "NIL") or script.heterogeneous:
        return
    cleared = any(one.name == "SLURM_EXPORT_ENV" for one in script.shell.assignments)
    step = next((step for step in script.steps if "export" not in step.options), None)
    if step and not cleared:
        reason = f"srun inherits --export={option.value}: its tasks get no variable, and no PATH"
        yield step.line, reason, "type srun --export=ALL", "unset SLURM_EXPORT_ENV before it"


def sbatch_in_job(script: LintedScript) -> Iterator[Found]:
    """Find an sbatch that gives this job's variables to the next job.

    Source: sbatch(1), INPUT ENVIRONMENT VARIABLES.
    """
    if _CLEARS_SLURM.search(script.text):
        return
    for launch in script.commands:
        # The same job again has the same variables.
        words = " ".join(launch.argv)
        right = re.search(r" --export=(NONE|NIL)", words) or _OWN_PATH.search(words)
        if launch.argv[0] == "sbatch" and not right:
            reason = "the next job inherits this job's SLURM_* variables, as options for its srun"
            yield launch.line, reason, 'unset "${!SLURM_@}" before it, at the end of the script'


def manual_rank(script: LintedScript) -> Iterator[Found]:
    """Find rank variables that the batch shell sets to one value for all tasks.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    steps = [step for step in script.steps if step.trains and (script.step_tasks(step)[0] or 0) > 1]
    # torchrun gives its ranks variables of their own.
    alone = any(step.kind == "python" for step in steps)
    for name in _RANKS if alone else _NODE_RANKS if steps else ():
        value = _exported(script, name)
        if value and (value.value.isdigit() or _OF_A_TASK.search(value.value)):
            reason = f"{name} is set once, in the batch shell, so all tasks have the same"
            fix = f"leave it out, or type srun bash -c '{name}=$SLURM_PROCID python …'"
            yield value.line, reason, fix
    size = _exported(script, "WORLD_SIZE") if alone else None
    tasks = {str(script.step_tasks(step)[0]) for step in steps}
    if size and size.value.isdigit() and size.value not in tasks:
        reason = f"WORLD_SIZE is {shown(size.value)}, and srun starts another number of tasks"
        yield size.line, reason, 'export WORLD_SIZE="$SLURM_NTASKS"'


def rank_of_batch_shell(script: LintedScript) -> Iterator[Found]:
    """Find rank variables in srun's line, replaced before tasks start (bash(1), EXPANSION)."""
    for step in script.steps:
        match = _OF_A_TASK.search(" ".join(step.argv))
        if match and (script.step_tasks(step)[0] or 0) > 1:
            name = match[1]
            reason = f"${name} is replaced here, in the batch shell, where it is 0, for all tasks"
            fix = f"let each task replace it: srun bash -c '… ${name} …' in single quotes"
            yield step.line, reason, fix


def manual_gpus(script: LintedScript) -> Iterator[Found]:
    """Find a CUDA_VISIBLE_DEVICES that the script sets, although Slurm sets it for the job's GPUs.

    If cgroups hide the other GPUs, the job's GPUs are 0 to N-1, so these numbers are accepted.
    Source: gres.conf(5) and the guide to GRES.
    """
    value, gpus = _exported(script, "CUDA_VISIBLE_DEVICES"), script.gpus_per_node
    if not value or not gpus or script.options.get("exclusive"):
        return
    listed = re.fullmatch(r"\d{1,4}(,\d{1,4})*", value.value, re.ASCII)
    if listed and max(map(int, value.value.split(","))) >= gpus:
        reason = f"the job has {gpus} GPUs on a node, and Slurm sets CUDA_VISIBLE_DEVICES to them"
        yield value.line, reason, "leave it out"


def fixed_port(script: LintedScript) -> Iterator[Found]:
    """Find a fixed port, on which two jobs on one host conflict, unless nodes are exclusive."""
    port = _exported(script, "MASTER_PORT")
    if not port or not port.value.isdigit() or script.options.get("exclusive"):
        return
    # torchrun takes its port from an option, and hpctrain run chooses one.
    takes_port = any(
        one.kind == "python" or (one.kind == "agent" and port.value in " ".join(one.argv))
        for one in script.commands
    )
    if takes_port:
        reason = f"two jobs on one host both take port {shown(port.value)}, and one of them fails"
        fix = "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))"
        yield port.line, reason, fix, "leave it out with hpctrain"


def secret_in_script(script: LintedScript) -> Iterator[Found]:
    """Find secrets in the script, of which Slurm keeps a copy (sbatch(1), AccountingStoreFlags)."""
    for one in script.shell.assignments:
        if not _SECRET.match(one.name) or not one.literal:
            continue
        reason = f"the script contains {one.name}, and Slurm and others keep copies of it"
        if one.name == "HPCTRAIN_SECRET" and one.value:
            yield one.line, reason, "leave it out: hpctrain run makes one for each start"
        elif len(one.value) >= 8 and not _PLACEHOLDER.search(plain(one.value)):
            fix = f'read it from a file that only you can read: {one.name}=$(<"$HOME/.{one.name}")'
            yield one.line, reason, fix


def script_path(script: LintedScript) -> Iterator[Found]:
    """Find uses of the script's own path, as Slurm runs a copy in a spool folder.

    Source: sbatch(1), DESCRIPTION.
    """
    # Such a script gets its path from scontrol show job.
    if "Command=" in script.text:
        return
    # A branch may be for those who start the script without Slurm.
    lines = [one.line for one in script.shell.assignments if one.sure and _is_own_path(one.value)]
    lines += [
        one.line
        for one in script.commands
        if one.argv[0] not in _HARMLESS_COMMANDS
        and not one.command.conditional
        and _is_own_path(" ".join(one.command.words))
    ]
    if lines:
        reason = "Slurm runs a copy of the script, so its own path is that of a spool folder"
        yield min(lines), reason, 'cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called'


def _is_own_path(text: str) -> bool:
    # As in ${SLURM_SUBMIT_DIR:-$(dirname "$0")}, it may be for a start without Slurm.
    return bool(_OWN_PATH.search(text)) and "SLURM_SUBMIT_DIR" not in text
