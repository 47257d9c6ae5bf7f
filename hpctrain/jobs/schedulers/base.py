"""What a batch script says to a scheduler. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpctrain.jobs import spec as job_spec
from hpctrain.jobs import units
from hpctrain.jobs.quoting import PLAIN
from hpctrain.jobs.spec import JobSpec

__all__ = [
    "LOG",
    "LOG_OF_ARRAY",
    "OF_SLURM",
    "Scheduler",
    "gpus",
    "log",
    "plain",
    "queue_and_account",
]

# Default names of the log. Source: "filename pattern" of sbatch(1).
LOG = "%x-%j.log"
LOG_OF_ARRAY = "%x-%A_%a.log"

# Fields for what hpctrain does in jobs of Slurm only.
OF_SLURM = (
    *("qos", "constraint", "exclude", "extra", "sweep", "part", "elastic", "spares"),
    *("finish", "container", "stage_code", "stage_environment", "stage_data"),
    *("max_restarts", "requeue_plain"),
)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A scheduler that runs batch scripts.

    Attributes:
        name: name for the user.
        directives: function that returns the lines with the options of a job. It raises ValueError
            with what was found and what was expected.
        lacks: fields of JobSpec that it has no option for.
        setup: lines of bash that come first.
    """

    name: str
    directives: Callable[[JobSpec], Sequence[str]]
    lacks: Sequence[str] = OF_SLURM
    setup: str = ""

    @property
    def is_slurm(self) -> bool:
        """Whether it sends the signal before the end, and tells `hpctrain run` the ranks."""
        return self.name == "slurm"

    def lines(self, spec: JobSpec) -> Sequence[str]:
        """Return the lines with the options of a job.

        Args:
            spec: description of the job.

        Raises:
            UsageError: the scheduler has no option for some of the values.
        """
        problems = [] if self.is_slurm else list(self._problems(spec))
        lines: Sequence[str] = ()
        try:
            lines = self.directives(spec)
        except ValueError as error:
            problems.append(error.args)
        if problems:
            raise job_spec.complaint(problems)
        return lines

    def before_run(self, spec: JobSpec) -> list[str]:
        """Return the words before `hpctrain run`, which end it in time, as Slurm's signal does."""
        if self.is_slurm or not (spec.time and spec.signal_seconds):
            return []
        # SECONDS of bash: the time since the start of the script. In the background, `timeout`
        # would send the signal to a second process as well.
        limit = units.seconds(spec.time) - spec.signal_seconds
        options = ["--foreground", "--preserve-status", f"--signal={spec.signal}"]
        # 0 would mean no limit.
        return ["timeout", *options, f"$(({limit} > SECONDS ? {limit} - SECONDS : 1))"]

    def _problems(self, spec: JobSpec) -> Iterator[tuple[str, str]]:
        default, there = JobSpec(), f"with the scheduler {self.name}"
        for field in self.lacks:
            if getattr(spec, field) != getattr(default, field):
                yield f"{field} {there}", "none: its scripts have no option for it"
        if spec.launcher != "hpctrain":
            yield f"launcher = {spec.launcher} {there}", "launcher = hpctrain"
        if spec.memory == "0":
            yield f"memory = 0 {there}", "a size"
        if spec.signal_time and not spec.time:
            yield f"signal_time without time, {there}", "both"
        if spec.array and spec.run_dir:
            yield f"run_dir and array {there}", "array: each task has its own"


def plain(name: str, value: str) -> str:
    """Return a value that every parser of directives takes as it is.

    Raises:
        ValueError: it has other characters.
    """
    if not PLAIN.match(value):
        raise ValueError(f"{name} = {value!r}", "letters, digits and @%+=:,./_-")
    return value


def queue_and_account(spec: JobSpec, queue: str, account: str) -> list[str]:
    """Return the given options with partition and account, as far as the job has them.

    Raises:
        ValueError: as for `plain`.
    """
    pairs = ((queue, "partition"), (account, "account"))
    return [f"{o} {plain(name, getattr(spec, name))}" for o, name in pairs if getattr(spec, name)]


def gpus(spec: JobSpec) -> int:
    """Return the number of GPUs of each host.

    Raises:
        ValueError: a type was given, which has another name at each site.
    """
    if spec.gpus_per_node != str(spec.gpus):
        raise ValueError(f"gpus_per_node = {spec.gpus_per_node}", "a number without a type")
    return spec.gpus


def log(spec: JobSpec, names: dict[str, str]) -> str:
    """Return the name of the log in the words of a scheduler.

    Args:
        spec: description of the job.
        names: what stands for each of Slurm's patterns %x, %j, %A and %a.

    Raises:
        ValueError: the scheduler has nothing for one of the patterns.
    """
    pattern = spec.output or (LOG_OF_ARRAY if spec.indices else LOG)
    parts = re.split(r"(%.)", plain("output", pattern))
    for part in parts[1::2]:
        if part not in names:
            raise ValueError(f"output = {pattern}", f"of the patterns only {', '.join(names)}")
    return "".join(names.get(part, part) for part in parts)
