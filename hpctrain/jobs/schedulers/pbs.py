"""#PBS lines of OpenPBS and PBS Professional. Source: qsub(1B) and pbs_resources(7B)."""

import re

from hpctrain.jobs import units
from hpctrain.jobs.schedulers.base import Scheduler, gpus, plain, queue_and_account
from hpctrain.jobs.spec import JobSpec

__all__ = ["SCHEDULER"]

_RANGE = re.compile(r"\d+-\d+(:\d+)?\Z", re.ASCII)
_DEPENDENCY = re.compile(r"after(ok|notok|any)?:[\w.\[\]-]+(:[\w.\[\]-]+)*\Z", re.ASCII)


def _lines(spec: JobSpec) -> list[str]:
    cpus, devices = spec.cpus_per_task or 1, gpus(spec)
    chunk = f"select={spec.nodes}:ncpus={spec.tasks * cpus}:mpiprocs={spec.tasks}:ompthreads={cpus}"
    chunk += f":ngpus={devices}" if devices else ""
    chunk += f":mem={spec.memory.lower()}b" if spec.memory else ""
    # qsub sends no variable without -V; sbatch sends all.
    lines = [f"-N {plain('name', spec.title)}", f"-l {chunk}", "-l place=scatter", "-j oe", "-V"]
    if spec.time:
        hours, rest = divmod(units.seconds(spec.time), 3600)
        lines.append(f"-l walltime={hours:02}:{rest // 60:02}:{rest % 60:02}")
    lines += queue_and_account(spec, "-q", "-A")
    if spec.dependency:
        if not _DEPENDENCY.match(spec.dependency):
            raise ValueError(f"dependency = {spec.dependency}", "one such as afterok:JOB:JOB")
        lines.append(f"-W depend={spec.dependency}")
    if spec.array:
        if not _RANGE.match(spec.array):
            raise ValueError(f"array = {spec.array}", "a range such as 0-5 or 0-10:2")
        lines.append(f"-J {spec.array}" + (f"%{spec.throttle}" if spec.throttle else ""))
    if spec.output:
        # PBS has no patterns but that of an array, and makes NAME.oJOBID by itself.
        if "%" in spec.output:
            raise ValueError(f"output = {spec.output}", "a name without patterns, or none")
        lines.append(f"-o {plain('output', spec.output)}")
    if spec.array and not spec.requeue:
        raise ValueError("requeue = false with an array", "requeue = true: qsub refuses -r n")
    lines.append(f"-r {'y' if spec.requeue else 'n'}")
    return [f"#PBS {line}" for line in lines]


# PBS starts a script in the home.
SCHEDULER = Scheduler("pbs", _lines, setup='cd "$PBS_O_WORKDIR"')
