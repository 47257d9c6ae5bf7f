"""#SBATCH lines of a job. Pure."""

from collections.abc import Iterator

from hpctrain.jobs.quoting import directive
from hpctrain.jobs.spec import JobSpec

__all__ = ["LOG", "LOG_OF_ARRAY", "directives"]

# Default names of the log. Source: "filename pattern" of sbatch(1).
LOG = "%x-%j.log"
LOG_OF_ARRAY = "%x-%A_%a.log"


def directives(spec: JobSpec) -> str:
    """Return a line for each option of sbatch; fields left to the cluster have no line."""
    return "\n".join(directive(name, value) for name, value in _options(spec))


def _options(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
    """Yield options and their values; None for an option without a value."""
    yield "job-name", spec.title
    for name, value in (*_size(spec), *_place(spec), *_mail(spec)):
        if value:
            yield name, value
    yield "output", spec.output or (LOG_OF_ARRAY if spec.indices else LOG)
    # Without it, each start empties the log.
    yield "open-mode", "append"
    if spec.signal_seconds:
        # B: signal only the batch shell, which has the trap.
        yield "signal", f"B:{spec.signal}@{spec.signal_seconds}"
    yield "requeue" if spec.requeue else "no-requeue", None
    if spec.elastic:
        yield "no-kill", None
    for name, extra in spec.extra.items():
        if extra is not False:
            yield name, None if extra is True else str(extra)


def _size(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the options for the size of the job.

    With `launcher = none` the defaults are left out, so that sbatch's own line decides.
    """
    if spec.launcher != "none" or spec.nodes != 1:
        yield "nodes", str(spec.nodes)
    if spec.launcher != "none" or spec.tasks != 1 or spec.tasks_per_node:
        yield "ntasks-per-node", str(spec.tasks)
    if spec.gpus:
        yield "gpus-per-node", spec.gpus_per_node
    yield "cpus-per-task", str(spec.cpus_per_task or "")
    yield "mem", spec.memory
    yield "time", spec.time


def _place(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for name in ("partition", "account", "qos", "constraint", "exclude", "comment"):
        yield name, getattr(spec, name)
    yield "dependency", ",".join(spec.dependency)
    throttle = f"%{spec.throttle}" if spec.throttle else ""
    yield "array", f"{spec.indices}{throttle}" if spec.indices else ""


def _mail(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.mail:
        yield "mail-user", spec.mail
        yield "mail-type", ",".join(spec.mail_events)
