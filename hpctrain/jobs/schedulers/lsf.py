"""#BSUB lines of LSF. Source: "bsub options" of IBM Spectrum LSF 10.1."""

import re

from hpctrain.jobs import units
from hpctrain.jobs.schedulers.base import Scheduler, gpus, log, plain, queue_and_account
from hpctrain.jobs.spec import JobSpec

__all__ = ["SCHEDULER"]

_INDICES = re.compile(r"[1-9]\d*(-\d+(:\d+)?)?(,[1-9]\d*(-\d+(:\d+)?)?)*\Z", re.ASCII)
_CONDITIONS = {"afterok": "done", "afternotok": "exit", "afterany": "ended", "after": "started"}
_DEPENDENCY = re.compile(r"(after(?:ok|notok|any)?)((?::\d+)+)\Z", re.ASCII)


def _lines(spec: JobSpec) -> list[str]:
    # A slot is a core on most clusters; -n counts those of all hosts.
    slots = spec.tasks * (spec.cpus_per_task or 1)
    name = plain("name", spec.title)
    if spec.array:
        if not _INDICES.match(spec.array):
            raise ValueError(f"array = {spec.array}", "indices from 1 on, such as 1-6 or 1,3,7")
        name = f'"{name}[{spec.array}]' + (f'%{spec.throttle}"' if spec.throttle else '"')
    lines = [f"-J {name}", f"-n {spec.nodes * slots}", f'-R "span[ptile={slots}]"']
    if devices := gpus(spec):
        lines.append(f'-gpu "num={devices}"')
    if spec.memory:
        lines.append(f'-R "rusage[mem={spec.memory}/host]"')
    if spec.time:
        hours, minutes = divmod(-(-units.seconds(spec.time) // 60), 60)
        lines.append(f"-W {hours}:{minutes:02}")
    lines += queue_and_account(spec, "-q", "-P")
    if spec.dependency:
        lines.append(f'-w "{_condition(spec.dependency)}"')
    patterns = {"%x": plain("name", spec.title), "%j": "%J", "%A": "%J", "%a": "%I"}
    lines.append(f"-o {log(spec, patterns)}")
    if spec.requeue:
        lines.append("-r")
    return [f"#BSUB {line}" for line in lines]


def _condition(dependency: str) -> str:
    match = _DEPENDENCY.match(dependency)
    if match is None:
        raise ValueError(f"dependency = {dependency}", "one such as afterok:123:124")
    condition = _CONDITIONS[match[1]]
    return " && ".join(f"{condition}({job})" for job in match[2].split(":")[1:])


SCHEDULER = Scheduler("lsf", _lines)
