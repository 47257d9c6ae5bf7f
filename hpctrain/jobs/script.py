"""Batch script of a JobSpec, as a person would write it: options, environment, one command. Pure.

`hpctrain run` does all that follows: it starts and ends the ranks, and requeues the job.
"""

import os.path
import re
import shlex
from collections.abc import Sequence

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.jobs import schedulers
from hpctrain.jobs.quoting import quote
from hpctrain.jobs.spec import JobSpec

__all__ = ["is_python", "render"]

_WIDTH = 100
_OPTIONS_OF_FLUX = re.compile(r"\A(\W*(?:flux|FLUX)):")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?\Z", re.ASCII)

_GUARD = """\
set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT"""

# Without it, a signal would end bash before hpctrain run handles it.
_IGNORE = "trap '' {signal} # until hpctrain run handles it"

_SITE = """\
: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true"""

# A batch shell is not a login shell, so `module` may not be defined yet.
_MODULES = """\
for file in /etc/profile.d/{{z00_lmod,lmod,modules}}.sh /usr/share/{{lmod/,}}modules/init/bash; do
    # shellcheck source=/dev/null
    [ ! -r "$file" ] || type module >/dev/null 2>&1 || . "$file" || true
done
{loads}"""

_CONDA = 'eval "$("${{CONDA_EXE:-conda}}" shell.bash hook)" && conda activate {name} || exit 2'


def render(spec: JobSpec, tree: str = "", scheduler: str = "slurm") -> str:
    """Return the text of the script that runs a job; the same spec gives the same text.

    Args:
        spec: description of the job.
        tree: snapshot of the code that the job runs; empty for the code as it is.
        scheduler: a name of `schedulers.SCHEDULERS`.

    Raises:
        UsageError: options of a command, but no command; the scheduler has nothing for a field.
    """
    chosen = schedulers.of(scheduler)
    signal = spec.signal if chosen.is_slurm and spec.signal_seconds else ""
    count = [] if chosen.is_slurm else ["--nproc-per-node", str(spec.tasks)]
    return _joined(
        _head(spec.about, chosen.lines(spec)),
        "\n".join([_GUARD, *([_IGNORE.format(signal=signal)] if signal else [])]),
        chosen.setup,
        _environment(spec),
        _wrapped(["exec", *chosen.before_run(spec), *_run(spec, tree, count), '"$@"']),
    )


def is_python(program: str) -> bool:
    """Check whether a program has the name of a Python interpreter."""
    return bool(_PYTHON.match(os.path.basename(program)))


def _starts_python(argv: Sequence[str]) -> bool:
    if len(argv) < 2 or not is_python(argv[0]):
        return False
    return not argv[1].startswith("-") or (argv[1] == "-m" and len(argv) > 2)


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(about: str, directives: Sequence[str]) -> str:
    # Flux takes any comment with its name and a colon for options.
    lines = [
        _OPTIONS_OF_FLUX.sub(r"\1 :", f"# {printable(line)}").rstrip()
        for line in about.strip().splitlines()
    ]
    return "\n".join(["#!/bin/bash", *lines, *["#"] * bool(lines), *directives])


def _environment(spec: JobSpec) -> str:
    """Return the lines for site file, modules, setup lines, Python environment and variables."""
    lines = [_SITE]
    if spec.modules:
        loads = "\n".join(f"module load {quote(name)} || exit 2" for name in spec.modules)
        lines.append(_MODULES.format(loads=loads))
    lines += spec.setup
    if spec.venv:
        # With a folder in front, bash cannot read the path as an option of the dot command.
        path = spec.venv if os.path.isabs(spec.venv) else f"./{spec.venv}"
        lines.append(f". {quote(path)}/bin/activate || exit 2")
    if spec.conda:
        lines.append(_CONDA.format(name=quote(spec.conda)))
    lines += [f"export {name}={quote(value)}" for name, value in spec.environment.items()]
    return "\n".join(lines)


def _run(spec: JobSpec, tree: str, count: Sequence[str]) -> list[str]:
    """Return the words of `hpctrain run`, each quoted for bash.

    Args:
        spec: description of the job.
        tree: snapshot of the code, or empty.
        count: option for the number of ranks on each host, or none.

    Raises:
        UsageError: options of a command, but no command.
    """
    if spec.sweep and not spec.command:
        raise UsageError("HT803.sweep-without-command")
    program, words = _program(spec)
    options = [*count, *(["--code", tree] if tree else [])]
    if spec.launcher == "none":
        options.append("--once")
    elif spec.launcher == "srun" or spec.container_runtime == "pyxis":
        options.append("--direct")
    for name in ("run_dir", "container", "stage_code", "stage_environment", "stage_data", "finish"):
        value = getattr(spec, name)
        value = "\n".join(value) if name == "finish" else value
        if value:
            options += _option(name.replace("_", "-"), value)
    if spec.container and spec.environment:
        options += ["--container-env", quote(",".join(spec.environment))]
    if spec.spares:
        options += ["--spares", str(spec.spares)]
    if spec.max_restarts is not None:
        options += ["--max-restarts", str(spec.max_restarts)]
    for name in ("elastic", "requeue_plain"):
        options += [f"--{name.replace('_', '-')}"] if getattr(spec, name) else []
    for setting in spec.sweep:
        text = " ".join(f"--{name} {shlex.quote(value)}" for name, value in setting)
        options += _option("setting", text)
    return [*program, *options, *words]


def _option(name: str, value: str) -> list[str]:
    """Return the words of an option; a separate value with a dash would be read as an option."""
    if value.startswith("-"):
        return [f"--{name}={quote(value)}"]
    return [f"--{name}", quote(value)]


def _program(spec: JobSpec) -> tuple[list[str], list[str]]:
    """Return the words that call `hpctrain run`, and those of the command after its options."""
    argv = spec.command
    # In a container or a staged environment, `python` is another program than here.
    inside = bool(spec.container or spec.stage_environment)
    if inside or spec.launcher != "hpctrain" or not _starts_python(argv):
        program = ["hpctrain"]
        if argv and os.path.isabs(argv[0]) and is_python(argv[0]) and not inside:
            # Its environment may not be on the PATH, as with a job of submitit.
            program = [quote(argv[0]), "-m", "hpctrain"]
        return [*program, "run"], ["--", *map(quote, argv)]
    command = ["hpctrain"] if argv[0] == "python" else [quote(argv[0]), "-m", "hpctrain"]
    return [*command, "run"], list(map(quote, argv[1:]))


def _wrapped(words: Sequence[str]) -> str:
    """Return a command of bash, on as many lines as its words need."""
    line = " ".join(words)
    if len(line) <= _WIDTH:
        return line
    lines = [""]
    for word in words:
        starts = word.startswith("--") and len(word) > 2
        full = len(lines[-1]) + len(word) + 3 > _WIDTH
        if lines[-1].strip() and (full or (starts and len(lines[-1]) > _WIDTH // 2)):
            lines.append(f"    {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
    return " \\\n".join(lines)
