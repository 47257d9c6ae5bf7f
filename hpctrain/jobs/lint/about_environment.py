"""Rules on quotes, variables and paths: the environment of tasks, the path of the script."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.directives import cut_export
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.shell import plain

__all__ = ["RULES"]

_OWN_PATH = re.compile(r"(?!.*SLURM_SUBMIT_DIR).*\$\{?[!#]?(0|BASH_SOURCE)\b", re.DOTALL)
_PORT = re.compile(r" --((?:master.|main.process.)port|rdzv.endpoint)[= ](\S*:|)([1-9]\d*)(?!\S)")
_SECRET = re.compile(r"\w*(PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|ACCESS_KEY)\Z")
_PLACEHOLDER = re.compile(
    r"[<$`/~]|\.\.\.|x{3,}|true\Z|false\Z|none\Z|your|my|change|\*{3}|here", re.IGNORECASE
)
_CLEARS_SLURM = re.compile(r"unset\b.*SLURM|env\s+(-i|-u\s*S(LURM|BATCH)_)|\$\{!SLURM_?[@*]")
# Commands for which the path of the spooled script, or its text, is right.
_HARMLESS = "echo printf logger basename cat cp [ [[ test case trap sbatch"


def _form(script: LintedScript) -> Iterator[Found]:
    """Yield what is wrong with the form of the script and its #SBATCH lines."""
    yield from script.directives.found
    yield from script.directives.missing_log_folders(script.folder)
    # Both tested with 22.05.
    if not script.text.startswith("#!"):
        reason = "sbatch refuses a script whose first line does not begin with #!"
        yield 1, "no-shebang", reason, "put #!/bin/bash into the first line, at its very beginning"
    before, carriage, _ = script.text.partition("\r\n")
    if carriage:
        reason = "lines end in \\r\\n, and sbatch refuses the script"
        yield before.count("\n") + 1, "dos-line-ends", reason, "sed -i 's/\\r$//' SCRIPT"


def _environment(script: LintedScript) -> Iterator[Found]:
    """Yield variables that hide GPUs, collide with other jobs, or do not reach the tasks."""
    exclusive, gpus = "exclusive" in script.options, script.gpus_per_node
    value = script.shell.exported("CUDA_VISIBLE_DEVICES")
    numbers = value.value.split(",") if value and gpus and not exclusive else ()
    # If cgroups hide the other GPUs, the job's GPUs are 0 to N-1, so these numbers are accepted.
    if value and any(one.isdecimal() and int(one) >= gpus for one in numbers):
        reason = f"the job has {gpus} GPUs on a node, and Slurm sets CUDA_VISIBLE_DEVICES to them"
        yield value.line, "manual-gpus", reason, "leave it out"
    if not script.whole_nodes:
        yield from _fixed_ports(script)
    # What a variable contains is unknown.
    for step in script.steps:
        given = step.options.get("export", "")
        if "$" not in given and (cut := cut_export(given)):
            yield step.line, "export-cut", *cut
    # sbatch(1): --export=NONE is for the steps too, until SLURM_EXPORT_ENV is not there.
    if script.value("export").upper() in ("NONE", "NIL") and "SLURM_EXPORT_ENV" not in script.text:
        for step in script.steps:
            if step.by and "export" not in step.options:
                reason = "srun inherits --export=NONE: its tasks get no variable, and no PATH"
                fix = "unset SLURM_EXPORT_ENV before it"
                yield step.line, "export-none", reason, "type srun --export=ALL", fix


def _fixed_ports(script: LintedScript) -> Iterator[Found]:
    """Yield fixed ports. torchrun takes its port from an option, and hpctrain run chooses one."""
    port = script.shell.exported("MASTER_PORT")
    ports: list[tuple[int, str, str]] = []
    if port and port.value.isdecimal() and any(one.kind == "python" for one in script.launches):
        ports = [(port.line, port.value, "export MASTER_PORT=")]
    for launch in script.launches:
        option = _PORT.search(launch.program) if launch.kind == "agent" else None
        host = "HOST:" if option and option[2] else ""
        ports += [(launch.line, option[3], f"type --{option[1]}={host}")] if option else []
    for line, number, fix in ports:
        reason = f"two jobs on one host both take port {shown(number)}, and one of them fails"
        other = "type hpctrain run, which finds a free port"
        yield line, "fixed-port", reason, fix + "$((10000 + SLURM_JOB_ID % 20000))", other


def _shell(script: LintedScript) -> Iterator[Found]:
    """Yield open quotes, secrets, the script's own path, and jobs that inherit variables."""
    # Here-documents in $(…), and quotes with a backslash in them, are not looked at.
    quote = script.shell.open_quote
    if quote and "<<" not in script.text and "$'" not in script.text:
        reason = "this quote is not closed, and bash ends here with an error"
        yield quote, "open-quote", reason, "type the other quote", "shellcheck SCRIPT"
    # Slurm keeps a copy of the script: sbatch(1), AccountingStoreFlags.
    for one in script.shell.variables:
        fix = f'read it from a file that only you can read: {one.name}=$(<"$HOME/.{one.name}")'
        secret = len(one.value) >= 8 and not _PLACEHOLDER.search(plain(one.value))
        if secret and _SECRET.match(one.name):
            reason = f"the script contains {one.name}, and Slurm and others keep copies of it"
            yield one.line, "secret-in-script", reason, fix
    # A branch may be for those who start the script without Slurm, and so is SLURM_SUBMIT_DIR:-$0.
    clears = _CLEARS_SLURM.search(script.text)
    paths = [(one.line, one.value) for one in script.shell.variables if one.sure]
    for launch in script.launches:
        words = " ".join(launch.command.words)
        if launch.argv[0] not in _HARMLESS.split() and not launch.command.conditional:
            paths.append((launch.line, words))
        # The same job again has the same variables. sbatch(1), INPUT ENVIRONMENT VARIABLES.
        right = re.search(r" --export=(NONE|NIL)", words) or _OWN_PATH.match(words)
        if launch.argv[0] == "sbatch" and not right and not clears:
            reason = "the next job inherits this job's SLURM_* variables, as options for its srun"
            fix = 'unset "${!SLURM_@}" before it, at the end of the script'
            yield launch.line, "sbatch-in-job", reason, fix
    # A script with Command= gets its path from scontrol show job.
    own = [line for line, text in paths if _OWN_PATH.match(text) and "Command=" not in script.text]
    if own:
        reason = "Slurm runs a copy of the script, so its own path is that of a spool folder"
        fix = 'cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called'
        yield min(own), "script-path", reason, fix


#: Functions that yield what is wrong with a script.
RULES = (_environment, _form, _shell)
