"""JobSpec: one description of a job, for sbatch and submitit. Pure."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from dataclasses import field as dataclass_field
from typing import Any

from hpctrain.cluster.texts import nearest, shortened
from hpctrain.errors import UsageError
from hpctrain.jobs import units, values

__all__ = ["LAUNCHERS", "JobSpec", "complaint", "names", "unknown"]

_SIGNAL_SECONDS = 120
# Agents of `hpctrain run` on each host; srun for each rank; the program starts its ranks itself.
LAUNCHERS = ("hpctrain", "srun", "none")
RUNTIMES = ("apptainer", "pyxis")
# Source: --signal of sbatch(1).
SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")

# Names of fields in other tools and in command-line options.
_OTHER_NAMES = {
    "env": "environment",
    "module": "modules",
    "cpus": "cpus_per_task",
    "script": "command",
    **{name.replace("-", "_"): f'{name} = "…" under [extra]' for name in values.EXTRA_OPTIONS},
}
_TAR = re.compile(r"\.(tar(\.\w+)?|t(gz|xz|bz2|zst))\Z", re.ASCII)
_NO_NAMES = ("", ".", "..")

# Fields that exclude each other, and fields that need another one.
_ONE_OF = (
    ("array", "sweep"), ("venv", "conda"), ("venv", "stage_environment"),
    ("conda", "stage_environment"), ("container", "venv"), ("container", "conda"),
    ("container", "stage_environment"), ("container", "elastic"), ("part", "array"),
    ("part", "sweep"), ("part", "spares"), ("part", "elastic"),
)  # fmt: skip
_NEEDS = (
    ("throttle", "array or sweep", "indices"), ("container_runtime", "container", "container"),
    ("max_restarts", "requeue", "requeue"), ("requeue_plain", "requeue", "requeue"),
)  # fmt: skip


def _field(check: Callable[[Any], Any], default: Any, about: str, metavar: str = "") -> Any:
    """Return a field with its check, its default and its help text."""
    metadata: dict[str, Any] = {"check": check, "help": about, "metavar": metavar}
    if isinstance(default, dict):
        return dataclass_field(default_factory=dict, metadata=metadata)
    return dataclass_field(default=default, metadata=metadata)


def _string(about: str, metavar: str = "") -> Any:
    """Return a field for a text, of one or more lines."""
    return _field(values.string, "", about, metavar)


def _line(about: str, metavar: str = "") -> Any:
    """Return a field whose value becomes a line of #SBATCH as it is; sbatch checks it."""
    return _field(values.line, "", about, metavar)


def _strings(about: str, metavar: str) -> Any:
    """Return a field for a list of texts."""
    return _field(values.strings, (), about, metavar)


def _flag(default: bool, about: str) -> Any:
    return _field(values.flag, default, about)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Description of a job. JOB.toml and, with dashes, `hpctrain submit` use the same names.

    The constructor checks all values, and reports all problems together. Numbers may be given as
    text. The cluster decides what is not set. sbatch itself checks what it refuses at once.

    Raises:
        UsageError: some values are invalid; the message has a line for each.
    """

    # fmt: off
    about: str = _string("description of the job, for the head of the script")
    name: str = _field(values.name, "", "name of the job (default: name of the script)", "NAME")
    command: tuple[str, ...] = _field(
        values.command, (), "program and arguments; no shell reads them")
    run_dir: str = _string("run directory (default: runs/NAME-JOBID)", "DIR")
    launcher: str = _field(
        values.one_of(LAUNCHERS), "hpctrain", f"launcher of the ranks: {', '.join(LAUNCHERS)}",
        "NAME")
    elastic: bool = _flag(False, "continue on the remaining hosts when one is lost")
    spares: int = _field(
        values.integer(0, 10**4), 0,
        "hosts beside those of `nodes` that have no ranks until one is lost (default: 0)", "N")

    nodes: int = _field(values.integer(1, 10**5), 1, "number of hosts", "N")
    tasks_per_node: int | None = _field(
        values.integer(1, 1024), None, "ranks on each host (default: one for each GPU, else one)",
        "N")
    gpus_per_node: str | int = _field(
        values.written(units.gpu_count), "0", "GPUs of each host, such as 4 or a100:4", "N")
    cpus_per_task: int | None = _field(values.integer(1, 4096), None, "CPUs for each rank", "N")
    memory: str = _field(
        values.written(units.memory), "", "memory of each host, such as 64G", "SIZE")
    time: str = _field(
        values.written(units.slurm_time), "", "time limit, such as 4h, 1d12h, 90m", "TIME")
    partition: str = _line("Slurm partition", "NAME")
    account: str = _line("Slurm account", "NAME")
    qos: str = _line("Slurm quality of service", "NAME")
    constraint: str = _line("features that hosts must have", "EXPR")
    exclude: str = _line("hosts not to use", "HOSTS")
    dependency: str = _line("jobs to wait for, such as afterok:123", "JOBS")
    part: tuple[Mapping[str, Any], ...] = _field(
        values.parts, (),
        "one more part of a heterogeneous job, with what differs from the first part")
    array: str = _line("array indices, such as 0-5 or 1,3,7; one task for each", "INDICES")
    sweep: tuple[tuple[tuple[str, str], ...], ...] = _field(
        values.sweep, (), "options and values to try: a grid, or a list of settings")
    throttle: int | None = _field(
        values.integer(1), None, "most tasks of an array or sweep that run at once", "N")
    output: str = _field(
        values.log, "",
        "log file, with Slurm's patterns (default: runs/%%x-%%j.log, of render %%x-%%j.log)",
        "PATTERN")

    signal: str = _field(values.one_of(SIGNALS), "USR2", "signal at which the script saves", "NAME")
    signal_time: int | None = _field(
        values.integer(0, 65535), None,
        "save margin: seconds from the signal to the end of the time (default: 120, or half of the "
        "time if that is less); 0: no signal", "SECONDS")
    requeue: bool = _flag(True, "start the job again after it was stopped")
    requeue_plain: bool = _flag(
        False, "at the end of the time, end a program without a Session by SIGTERM and start the "
        "job again; the program has to continue from its own checkpoints")
    max_restarts: int | None = _field(
        values.integer(0), None, "largest number of restarts (default: no limit)", "N")

    environment: Mapping[str, str] = _field(
        values.environment, {}, "environment variables of the ranks")
    modules: tuple[str, ...] = _strings("modules for `module load`", "NAME")
    setup: tuple[str, ...] = _strings(
        "lines of bash that run before the ranks; besides finish the only field that is code",
        "LINE")
    finish: tuple[str, ...] = _strings(
        "lines of bash that run on the first host after the ranks have succeeded", "LINE")
    venv: str = _string("virtual environment to activate", "DIR")
    conda: str = _string("conda environment to activate", "NAME")
    container: str = _string("container image in which the ranks run", "IMAGE")
    container_runtime: str = _field(
        values.one_of(("", *RUNTIMES)), "", "container runtime: apptainer (default) or pyxis",
        "NAME")
    live: bool = _flag(
        False, "run the code as it is at each start, and not as it was at the submission")
    stage_code: str = _string(
        "folder that each host copies to its own disk; the ranks start in it", "DIR")
    stage_environment: str = _string(
        "archive of an environment that each host unpacks on its own disk", "FILE.tar")
    stage_data: str = _string(
        "folder that each host copies to its own disk, into $HPCTRAIN_DATA",
        "DIR")
    extra: Mapping[str, str | bool] = _field(values.extra, {}, "other options of sbatch")
    # fmt: on

    def __post_init__(self) -> None:
        """Check and convert all values."""
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is type(field.default) and value == field.default:
                continue
            try:
                object.__setattr__(self, field.name, field.metadata["check"](value))
            except (ValueError, TypeError) as error:
                problems.append((f"{field.name} = {_shown(value)}", str(error)))
        if problems := problems or [*self._contradictions()]:
            raise complaint(problems)
        for number, own in enumerate(self.part, 2):
            try:
                replace(self, part=(), **own)
            except UsageError as error:
                raise UsageError("HT801.invalid-part", number=number, error=error) from None

    @property
    def gpus(self) -> int:
        """The number of GPUs of each node."""
        return units.gpu_count(str(self.gpus_per_node))

    @property
    def tasks(self) -> int:
        """The number of ranks on each node."""
        return self.tasks_per_node or self.gpus or 1

    @property
    def parts(self) -> tuple["JobSpec", ...]:
        """The parts of a heterogeneous job as jobs of their own; other jobs have one part."""
        first = replace(self, part=())
        return first, *(replace(first, **own) for own in self.part)

    @property
    def ranks(self) -> int:
        """The number of ranks of all parts."""
        return sum(part.nodes * part.tasks for part in self.parts)

    @property
    def signal_seconds(self) -> int:
        """Save margin: seconds from the signal to the end of the time; 0 for no signal."""
        if self.signal_time is not None:
            return self.signal_time
        return min(_SIGNAL_SECONDS, units.seconds(self.time) // 2) if self.time else _SIGNAL_SECONDS

    @property
    def title(self) -> str:
        """The job's name: as given, else the name of the script or module."""
        if self.name:
            return self.name
        scripts = [word for word in self.command if word.endswith(".py")] or self.command[:1]
        if len(self.command) > 2 and self.command[1] == "-m":
            scripts = [self.command[2].rpartition(".")[2]]
        plain = re.sub(r"[^\w.-]", "_", os.path.basename(scripts[0])) if scripts else ""
        return plain.removesuffix(".py")[: values.LONGEST_NAME] or "job"

    @property
    def indices(self) -> str:
        """The indices of the array or sweep; empty for other jobs."""
        return f"0-{len(self.sweep) - 1}" if self.sweep else self.array

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield contradictions between fields: what was found, what was expected."""
        for name, other in _ONE_OF:
            if getattr(self, name) and getattr(self, other):
                yield f"{name} and {other}", "one of them"
        for name, text, other in _NEEDS:
            if getattr(self, name) and not getattr(self, other):
                yield f"{name} without {text}", "both"
        one_rank = self.launcher == "none" or any(
            word.endswith("dataparallel") for word in self.command
        )
        if self.gpus not in (0, self.tasks) and not one_rank:
            yield (
                f"tasks_per_node = {self.tasks} with {self.gpus} GPUs on each node",
                f"a rank for each GPU: tasks_per_node = {self.gpus}, or none",
            )
        if self.time and self.signal_seconds >= units.seconds(self.time):
            found = f"signal_time = {self.signal_seconds} and time = {self.time}"
            yield found, "less than the whole time, in seconds"
        for name in ("elastic", "spares"):
            if getattr(self, name) and self.launcher != "hpctrain":
                yield f"{name} with launcher = {self.launcher}", "launcher = hpctrain"
        pyxis = self.container_runtime == "pyxis"
        if self.container and self.launcher not in ("hpctrain", "srun" if pyxis else ""):
            expected = "launcher = hpctrain, or srun with container_runtime = pyxis"
            yield f"container with launcher = {self.launcher}", expected
        staged = self.stage_code or self.stage_environment or self.stage_data
        if staged and (pyxis or self.launcher != "hpctrain"):
            yield "stage_… with another launcher than hpctrain", "launcher = hpctrain"
        if self.stage_environment and not _TAR.search(self.stage_environment):
            found = f"stage_environment = {_shown(self.stage_environment)}"
            yield found, "a tar archive, such as env.tar.gz"
        if self.stage_data and os.path.basename(self.stage_data.rstrip("/")) in _NO_NAMES:
            expected = "a folder by its name, as that is the name of the copy"
            yield f"stage_data = {_shown(self.stage_data)}", expected


def names() -> list[str]:
    """Return the names of all fields."""
    return [field.name for field in fields(JobSpec)]


def unknown(given: Sequence[str]) -> list[tuple[str, str]]:
    """Return a problem for each name that is no field; the last one lists all fields."""
    problems = []
    for name in map(str, given):
        if name not in names():
            meant = values.OWN_OPTIONS.get(name.replace("_", "-")) or _OTHER_NAMES.get(name)
            problems.append((_shown(name), meant or nearest(name, names()) or "another name"))
    if problems:
        problems[-1] = (problems[-1][0], f"{problems[-1][1]}; all names: {', '.join(names())}")
    return problems


def complaint(problems: Sequence[tuple[str, str]], source: str = "the job") -> UsageError:
    """Return an error with all problems: what was found and what was expected for each."""
    lines = "".join(f"\n  {found}\n    expected: {expected}" for found, expected in problems)
    return UsageError("HT801.invalid-values", source=source, count=len(problems), lines=lines)


def _shown(value: Any) -> str:
    return shortened(repr(value), 100)
