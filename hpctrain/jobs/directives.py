"""#SBATCH lines of a job. Pure."""

from collections.abc import Iterator

from hpctrain.jobs.quoting import directive
from hpctrain.jobs.spec import JobSpec

__all__ = ["LOG", "LOG_OF_ARRAY", "directives"]

# Default names of the log. Source: "filename pattern" of sbatch(1).
LOG = "%x-%j.log"
LOG_OF_ARRAY = "%x-%A_%a.log"

# Fields that have sbatch's own names.
_AS_THEY_ARE = ("partition", "account", "qos", "constraint", "exclude", "dependency")


def directives(spec: JobSpec) -> str:
    """Return a line for each option of sbatch; fields left to the cluster have no line."""
    return "\n".join(directive(name, value) for name, value in _options(spec))


def _options(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
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
