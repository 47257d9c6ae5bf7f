"""#SBATCH lines. Source: sbatch(1)."""

from collections.abc import Iterator

from hpctrain.jobs.quoting import directive
from hpctrain.jobs.schedulers.base import LOG, LOG_OF_ARRAY, Scheduler
from hpctrain.jobs.spec import JobSpec

__all__ = ["SCHEDULER"]

# Fields that have sbatch's own names.
_AS_THEY_ARE = ("partition", "account", "qos", "constraint", "exclude")


def _lines(spec: JobSpec) -> list[str]:
    lines = [directive(name, value) for name, value in _options(spec)]
    for part in spec.parts[1:]:
        lines.append("#SBATCH hetjob")
        lines += [directive(name, value) for name, value in (*_hosts(part), *_again(part))]
    return lines


def _options(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
    """Yield options and their values; None for an option without a value."""
    throttle = f"%{spec.throttle}" if spec.throttle else ""
    yield "job-name", spec.title
    yield from _hosts(spec)
    if spec.dependency:
        yield "dependency", spec.dependency
    if spec.indices:
        yield "array", f"{spec.indices}{throttle}"
    yield "output", spec.output or (LOG_OF_ARRAY if spec.indices else LOG)
    # Without it, each start empties the log.
    yield "open-mode", "append"
    if spec.signal_seconds:
        # B: signal only the batch shell, which has the trap.
        yield "signal", f"B:{spec.signal}@{spec.signal_seconds}"
    yield from _again(spec)


def _hosts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    # With `launcher = none` the defaults are left out, so that sbatch's own line decides.
    alone = spec.launcher == "none"
    nodes = spec.nodes + spec.spares
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
    ):
        if value:
            yield name, str(value)


def _again(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
    yield "requeue" if spec.requeue else "no-requeue", None
    if spec.elastic or spec.spares:
        yield "no-kill", None
    for name, extra in spec.extra.items():
        if extra is not False:
            yield name, None if extra is True else str(extra)


SCHEDULER = Scheduler("slurm", _lines, lacks=())
