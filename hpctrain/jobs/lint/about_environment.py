"""Rules on variables and paths: the environment of tasks, and the path of the running script."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.lint_finding import LintFinding, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.words import Word

__all__ = ["RULES"]

_OF_A_TASK = frozenset(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
_NODE_RANKS = ("NODE_RANK", "GROUP_RANK")
_RANKS = ("RANK", "LOCAL_RANK", *_NODE_RANKS)
_SECRET = re.compile(r"(\w*(PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|ACCESS_KEY))\Z")
_PLACEHOLDER = re.compile(
    r"<|/|~|\.\.\.|x{3,}|true\Z|false\Z|none\Z|your|my|change|\*{3}|here", re.IGNORECASE
)
_OWN_PATH = frozenset(("0", "BASH_SOURCE"))
# Commands for which the path of the spooled script is harmless.
_HARMLESS_COMMANDS = frozenset(
    ("echo", "printf", "logger", "basename", "[", "[[", "test", "case", "trap", "sbatch")
)


def not_exported(script: LintedScript) -> Iterator[LintFinding]:
    """Find steps that inherit --export=NONE, as SLURM_EXPORT_ENV is not set (sbatch(1))."""
    option = script.options.get("export")
    if not option or option.value.upper() not in ("NONE", "NIL") or script.heterogeneous:
        return
    if script.variables.assigned.get("SLURM_EXPORT_ENV"):
        return
    step = next((step for step in script.steps if "export" not in step.options), None)
    if step:
        yield LintFinding(
            step.command.line,
            "export-none",
            f"srun inherits --export={shown(option.value)} from line {option.line}: its tasks get "
            "neither PATH nor any variable of this script",
            ("type srun --export=ALL", "unset SLURM_EXPORT_ENV before it"),
        )


def nested_sbatch(script: LintedScript) -> Iterator[LintFinding]:
    """Find an sbatch that gives this job's variables to the next job.

    Source: sbatch(1), INPUT ENVIRONMENT VARIABLES.
    """
    scrubs = re.search(
        r"unset\b.*SLURM|env\s+(-i|-u\s*S(LURM|BATCH)_)|\$\{!SLURM_?[@*]", script.text
    )
    for launch in script.commands:
        cleared = any(word.startswith(("--export=NONE", "--export=NIL")) for word in launch.argv)
        # The same job again has the same variables.
        itself = any(_mentions(word) & _OWN_PATH for word in launch.command.words)
        if launch.argv[0] == "sbatch" and not scrubs and not cleared and not itself:
            yield LintFinding(
                launch.command.line,
                "sbatch-in-job",
                "sbatch in a job gives this job's SLURM_* variables to the next one, whose srun "
                "takes them for options",
                ('unset "${!SLURM_@}" before it, at the end of the script',),
            )


def manual_rank(script: LintedScript) -> Iterator[LintFinding]:
    """Find rank variables that the batch shell sets to one value for all tasks.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    steps = [step for step in script.steps if step.trains and (script.step_tasks(step)[0] or 0) > 1]
    # torchrun gives its ranks variables of their own.
    alone = any(step.kind == "python" for step in steps)
    for name in _RANKS if alone else _NODE_RANKS if steps else ():
        value = script.variables.get(name)
        fixed = value and (value.text.isdigit() or _mentions(value) & _OF_A_TASK)
        if value and fixed and name in script.variables.exported:
            yield LintFinding(
                value.line,
                "manual-rank",
                f"{name} is set once, in the batch shell, so all tasks have the same",
                (
                    "leave it out: each task has SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID, as "
                    f"in srun bash -c '{name}=$SLURM_PROCID python …'",
                ),
            )
    value = script.variables.get("WORLD_SIZE")
    given = value.text if value and "WORLD_SIZE" in script.variables.exported else ""
    tasks = {str(script.step_tasks(step)[0]) for step in steps}
    if alone and value and given.isdigit() and given not in tasks:
        yield LintFinding(
            value.line,
            "manual-rank",
            f"WORLD_SIZE is {shown(given)}, and srun starts another number of tasks",
            ('export WORLD_SIZE="$SLURM_NTASKS"',),
        )


def rank_of_batch_shell(script: LintedScript) -> Iterator[LintFinding]:
    """Find rank variables in srun's line, replaced before tasks start (bash(1), EXPANSION)."""
    alone = {
        name
        for name in script.variables.assigned
        if (word := script.variables.get(name)) and _mentions(word) & _OF_A_TASK
    }
    for step in script.steps:
        tasks = script.step_tasks(step)[0]
        words = [word for word in step.command.words if _mentions(word) & (_OF_A_TASK | alone)]
        if words and tasks and tasks > 1:
            name = sorted(_mentions(words[0]) & (_OF_A_TASK | alone))[0]
            yield LintFinding(
                words[0].line,
                "rank-of-batch-shell",
                f"${name} is replaced here, in the batch shell, where it is 0, for all tasks",
                (f"let each task replace it: srun bash -c '… ${name} …' in single quotes",),
            )


def manual_gpus(script: LintedScript) -> Iterator[LintFinding]:
    """Find a CUDA_VISIBLE_DEVICES that the script sets, although Slurm sets it for the job's GPUs.

    If cgroups hide the other GPUs, the job's GPUs are 0 to N-1, so these numbers are accepted.
    Source: gres.conf(5) and the guide to GRES.
    """
    value, gpus = script.variables.get("CUDA_VISIBLE_DEVICES"), script.gpus_per_node
    listed = bool(value and re.fullmatch(r"\d{1,4}(,\d{1,4})*", value.text, re.ASCII))
    exported = "CUDA_VISIBLE_DEVICES" in script.variables.exported
    if not value or not gpus or not listed or not exported or script.options.get("exclusive"):
        return
    if max(int(number) for number in value.text.split(",")) >= gpus:
        yield LintFinding(
            value.line,
            "manual-gpus",
            f"of the job's {gpus} GPUs on a node, none is surely called {shown(value.text)}: Slurm "
            "sets CUDA_VISIBLE_DEVICES to those that it gave",
            ("leave it out",),
        )


def fixed_port(script: LintedScript) -> Iterator[LintFinding]:
    """Find a fixed port, on which two jobs on one host conflict, unless nodes are exclusive."""
    value = script.variables.get("MASTER_PORT")
    exported = "MASTER_PORT" in script.variables.exported
    if not value or not exported or not value.text.isdigit() or script.options.get("exclusive"):
        return
    # torchrun takes its port from an option.
    uses_port = any(
        launch.kind == "python"
        or (
            launch.trains and any("MASTER_PORT" in _mentions(word) for word in launch.command.words)
        )
        for launch in script.commands
    )
    if uses_port:
        yield LintFinding(
            value.line,
            "fixed-port",
            f"two jobs on one host both take port {shown(value.text)}, and one fails or joins the "
            "other",
            ("export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))", "leave it out with hpctrain"),
        )


def secret(script: LintedScript) -> Iterator[LintFinding]:
    """Find secrets in the script, of which Slurm keeps a copy (sbatch(1), AccountingStoreFlags)."""
    for name, value, _ in script.variables.written:
        text = value.text if value.literal and _SECRET.match(name) else ""
        is_hpctrains = name == "HPCTRAIN_SECRET"
        if (text and is_hpctrains) or (len(text) >= 8 and not _PLACEHOLDER.search(text)):
            yield LintFinding(
                value.line,
                "secret-in-script",
                f"the script contains {name}, and Slurm and others keep copies of it",
                (
                    (
                        f"{name}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
                        "leave it out with hpctrain run, which makes one for each start",
                    )
                    if is_hpctrains
                    else (
                        f'read it from a file that only you can read: {name}=$(<"$HOME/.{name}")',
                    )
                ),
            )


def script_path(script: LintedScript) -> Iterator[LintFinding]:
    """Find uses of the script's own path, as Slurm runs a copy in a spool folder.

    Source: sbatch(1), DESCRIPTION.
    """
    # Such a script gets its path from scontrol show job.
    if re.search(r"Command=", script.text):
        return
    for launch in script.commands:
        uses_path = any(_mentions(word) & _OWN_PATH for word in launch.command.words)
        # A branch may be for those who start the script without Slurm.
        if (
            uses_path
            and launch.argv[0] not in _HARMLESS_COMMANDS
            and not launch.command.conditional
        ):
            yield _spooled(launch.command.line)
            return
    for _, value, sure in script.variables.written:
        if sure and _mentions(value) & _OWN_PATH:
            yield _spooled(value.line)
            return


def _spooled(line: int) -> LintFinding:
    return LintFinding(
        line,
        "script-path",
        "Slurm runs a copy of the script, so its own path is that of a spool folder",
        ('cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called',),
    )


def _mentions(word: Word) -> set[str]:
    return {piece.mentions for piece in word.pieces if piece.mentions}


RULES = (
    *(not_exported, nested_sbatch, manual_rank, rank_of_batch_shell),
    *(manual_gpus, fixed_port, secret, script_path),
)
