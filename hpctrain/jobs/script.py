"""Batch script of a JobSpec, as a person would write it: options, environment, one command. Pure.

`hpctrain run` does all that follows: it starts and ends the ranks, and requeues the job.
"""

import os.path
import re
import shlex
from collections.abc import Iterator, Sequence

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.jobs.quoting import directive, quote
from hpctrain.jobs.spec import JobSpec

__all__ = ["LOG", "LOG_OF_ARRAY", "is_python", "render"]

# Default names of the log. Source: "filename pattern" of sbatch(1).
LOG = "%x-%j.log"
LOG_OF_ARRAY = "%x-%A_%a.log"

# Fields that have sbatch's own names.
_AS_THEY_ARE = ("partition", "account", "qos", "constraint", "exclude", "dependency")

_WIDTH = 100
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


def render(spec: JobSpec, tree: str = "") -> str:
    """Return the text of the script that runs a job; the same spec gives the same text.

    Args:
        spec: description of the job.
        tree: snapshot of the code that the job runs; empty for the code as it is.

    Raises:
        UsageError: options of a command, but no command.
    """
    signal = spec.signal if spec.signal_seconds else ""
    return _joined(
        _head(spec),
        "\n".join([_GUARD, *([_IGNORE.format(signal=signal)] if signal else [])]),
        _environment(spec),
        _wrapped(["exec", *_run(spec, tree), '"$@"']),
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


def _head(spec: JobSpec) -> str:
    lines = [f"# {printable(line)}".rstrip() for line in spec.about.strip().splitlines()]
    options = [directive(name, value) for name, value in _directives(spec)]
    return "\n".join(["#!/bin/bash", *lines, *["#"] * bool(lines), *options])


def _directives(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
    """Yield options and their values; None for an option without a value."""
    # With `launcher = none` the defaults are left out, so that sbatch's own line decides.
    alone = spec.launcher == "none"
    nodes = spec.nodes + spec.spares
    throttle = f"%{spec.throttle}" if spec.throttle else ""
    yield "job-name", spec.title
    for name, value in (
        ("nodes", "" if alone and nodes == 1 else nodes),
        (
            "ntasks-per-node",
            (spec.tasks_per_node or "") if alone and spec.tasks == 1 else spec.tasks,
        ),
        ("gpus-per-node", spec.gpus and spec.gpus_per_node),
        ("cpus-per-task", spec.cpus_per_task),
        ("mem", spec.memory),
        ("time", spec.time),
        *((name, getattr(spec, name)) for name in _AS_THEY_ARE),
        ("array", spec.indices and f"{spec.indices}{throttle}"),
    ):
        if value:
            yield name, str(value)
    yield "output", spec.output or (LOG_OF_ARRAY if spec.indices else LOG)
    # Without it, each start empties the log.
    yield "open-mode", "append"
    if spec.signal_seconds:
        # B: signal only the batch shell, which has the trap.
        yield "signal", f"B:{spec.signal}@{spec.signal_seconds}"
    yield "requeue" if spec.requeue else "no-requeue", None
    if spec.elastic or spec.spares:
        yield "no-kill", None
    for name, extra in spec.extra.items():
        if extra is not False:
            yield name, None if extra is True else str(extra)


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


def _run(spec: JobSpec, tree: str) -> list[str]:
    """Return the words of `hpctrain run`, each quoted for bash.

    Raises:
        UsageError: options of a command, but no command.
    """
    if spec.sweep and not spec.command:
        raise UsageError("HT803", "sweep without a command", "the command that gets these options")
    program, words = _program(spec)
    options: list[str] = ["--code", tree] if tree else []
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
