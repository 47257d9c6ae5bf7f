"""Lines of directives of Flux. Source: flux-batch(1) of flux-core."""

from hpctrain.jobs import units
from hpctrain.jobs.schedulers.base import OF_SLURM, Scheduler, gpus, log, plain
from hpctrain.jobs.spec import JobSpec

__all__ = ["SCHEDULER"]


def _lines(spec: JobSpec) -> list[str]:
    name = plain("name", spec.title)
    options = [
        ("job-name", name),
        ("nodes", spec.nodes),
        ("nslots", spec.nodes * spec.tasks),
        ("cores-per-slot", spec.cpus_per_task),
        ("gpus-per-slot", gpus(spec) // spec.tasks),
        # The command's own unit for a number alone is a minute.
        ("time-limit", spec.time and f"{units.seconds(spec.time)}s"),
        *((o, getattr(spec, f) and plain(f, getattr(spec, f))) for o, f in _NAMES.items()),
        ("output", log(spec, {"%x": name, "%j": "{{id}}"})),
    ]
    lines = [f"#flux: --{option}={value}" for option, value in options if value]
    if gpus(spec):
        # Whole hosts, and no CUDA_VISIBLE_DEVICES: that of the first host would reach all others.
        lines += ["#flux: --exclusive", "#flux: -o gpu-affinity=off"]
    return lines


_NAMES = {"queue": "partition", "bank": "account", "dependency": "dependency"}
# It has no limit for the memory, and its arrays are several jobs.
SCHEDULER = Scheduler("flux", _lines, lacks=(*OF_SLURM, "memory", "array"))
