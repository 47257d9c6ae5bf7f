"""JobSpec: one description of a job, for sbatch, submitit and this machine. Pure."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from typing import Any

from hpctrain.cluster import entry_points, env_vars
from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError
from hpctrain.jobs import units, values

__all__ = ["BACKENDS", "LAUNCHERS", "JobSpec", "complaint", "names", "unknown"]

_SIGNAL_SECONDS = 120
# Agents of `hpctrain run` on each host; srun for each rank; the program starts its ranks itself.
LAUNCHERS = ("hpctrain", "srun", "none")
BACKENDS = ("auto", "single", "ddp", "horovod", "dataparallel")
RUNTIMES = ("apptainer", "pyxis")
# Source: --signal and --mail-type of sbatch(1).
SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")
MAIL_EVENTS = (
    *("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT"),
    *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS"),
)

# Names of fields in other tools and in command-line options.
_OTHER_NAMES = {
    "env": "environment",
    "module": "modules",
    "cpus": "cpus_per_task",
    "script": "command",
}
_DEPENDENCY = re.compile(r"(?:singleton|after(?:\w+)?(?::\d+(?:_\d+)?(?:\+\d+)?)+)\Z", re.ASCII)
_ARRAY = re.compile(r"\d+(?:-\d+(?::[1-9]\d*)?)?(?:,\d+(?:-\d+(?::[1-9]\d*)?)?)*\Z", re.ASCII)
_TAR = re.compile(r"\.(tar(\.\w+)?|t(gz|xz|bz2|zst))\Z", re.ASCII)
_NO_NAMES = ("", ".", "..")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)


def _more_backends() -> list[str]:
    return [entry.name for entry in entry_points.found(entry_points.BACKENDS)]


def _field(check: Callable[[Any], Any], default: Any, about: str, metavar: str = "") -> Any:
    """Return a field with its check, its default and its help text."""
    metadata: dict[str, Any] = {"check": check, "help": about, "metavar": metavar}
    if isinstance(default, dict):
        return dataclass_field(default_factory=dict, metadata=metadata)
    return dataclass_field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Description of a job. JOB.toml and, with dashes, `hpctrain submit` use the same names.

    The constructor checks all values, and reports all problems together. Numbers may be given as
    text. The cluster decides what is not set.

    Raises:
        UsageError: some values are invalid; the message has a line for each.
    """

    about: str = _field(values.string, "", "description of the job, for the head of the script")
    name: str = _field(values.name, "", "name of the job (default: name of the script)", "NAME")
    comment: str = _field(values.line, "", "comment for scontrol and sacct", "TEXT")
    cluster: str = _field(values.line, "", "profile [cluster.NAME] of your settings", "NAME")
    command: tuple[str, ...] = _field(
        values.command, (), "program and arguments; no shell reads them"
    )
    function: str = _field(
        values.matching(_FUNCTION, "MODULE:FUNCTION"),
        "", "Python function to run instead of a command", "MODULE:FUNCTION",
    )  # fmt: skip
    run_dir: str = _field(values.string, "", "run directory (default: runs/NAME-JOBID)", "DIR")
    launcher: str = _field(
        values.one_of(LAUNCHERS),
        "hpctrain",
        f"launcher of the ranks: {', '.join(LAUNCHERS)}",
        "NAME",
    )
    elastic: bool = _field(values.flag, False, "continue on the remaining hosts when one is lost")
    backend: str = _field(
        values.one_of(("", *BACKENDS), _more_backends),
        "",
        "communication backend of the ranks, passed to the script",
        "NAME",
    )

    nodes: int = _field(values.integer(1, 10**5), 1, "number of hosts", "N")
    tasks_per_node: int | None = _field(
        values.integer(1, 1024),
        None,
        "ranks on each host (default: one for each GPU, else one)",
        "N",
    )
    gpus_per_node: str = _field(
        values.written(units.gpu_count), "0", "GPUs of each host, such as 4 or a100:4", "N"
    )
    cpus_per_task: int | None = _field(values.integer(1, 4096), None, "CPUs for each rank", "N")
    memory: str = _field(
        values.written(units.memory), "", "memory of each host, such as 64G", "SIZE"
    )
    time: str = _field(
        values.written(units.slurm_time), "", "time limit, such as 4h, 1d12h, 90m", "TIME"
    )
    partition: str = _field(values.line, "", "Slurm partition", "NAME")
    account: str = _field(values.line, "", "Slurm account", "NAME")
    qos: str = _field(values.line, "", "Slurm quality of service", "NAME")
    constraint: str = _field(values.line, "", "features that hosts must have", "EXPR")
    exclude: str = _field(values.line, "", "hosts not to use", "HOSTS")
    dependency: tuple[str, ...] = _field(
        values.list_of(values.matching(_DEPENDENCY, "such as afterok:123, or singleton"), ","),
        (), "jobs to wait for, such as afterok:123", "JOBS",
    )  # fmt: skip
    array: str = _field(
        values.matching(_ARRAY, "indices such as 0-5 or 1,3,7"),
        "",
        "array indices; one task for each",
        "INDICES",
    )
    sweep: tuple[tuple[tuple[str, str], ...], ...] = _field(
        values.sweep, (), "options and values to try: a grid, or a list of settings"
    )
    throttle: int | None = _field(
        values.integer(1), None, "most tasks of an array or sweep that run at once", "N"
    )
    mail: str = _field(values.line, "", "address for Slurm's mails about the job", "ADDRESS")
    mail_events: tuple[str, ...] = _field(
        values.list_of(values.one_of(MAIL_EVENTS), ","),
        ("END", "FAIL"),
        "events that cause a mail",
        "EVENTS",
    )
    output: str = _field(
        values.log,
        "",
        "log file, with Slurm's patterns (default: runs/%%x-%%j.log, of render %%x-%%j.log)",
        "PATTERN",
    )

    signal: str = _field(values.one_of(SIGNALS), "USR2", "signal at which the script saves", "NAME")
    signal_time: int | None = _field(
        values.integer(0, 65535),
        None,
        "save margin: seconds from the signal to the end of the time (default: 120, or half of the "
        "time if that is less); 0: no signal",
        "SECONDS",
    )
    requeue: bool = _field(values.flag, True, "start the job again after it was stopped")
    requeue_plain: bool = _field(
        values.flag,
        False,
        "at the end of the time, end a program without a Session by SIGTERM and start the job "
        "again; the program has to continue from its own checkpoints",
    )
    max_restarts: int | None = _field(
        values.integer(0),
        None,
        "largest number of restarts (default: no limit)",
        "N",
    )

    environment: Mapping[str, str] = _field(
        values.environment, {}, "environment variables of the ranks"
    )
    modules: tuple[str, ...] = _field(
        values.list_of(values.string), (), "modules for `module load`", "NAME"
    )
    setup: tuple[str, ...] = _field(
        values.list_of(values.string),
        (),
        "lines of bash that run before the ranks; besides finish the only field that is code",
        "LINE",
    )
    finish: tuple[str, ...] = _field(
        values.list_of(values.string),
        (),
        "lines of bash that run on the first host after the ranks have succeeded",
        "LINE",
    )
    venv: str = _field(values.string, "", "virtual environment to activate", "DIR")
    conda: str = _field(values.string, "", "conda environment to activate", "NAME")
    container: str = _field(values.string, "", "container image in which the ranks run", "IMAGE")
    container_runtime: str = _field(
        values.one_of(("", *RUNTIMES)),
        "",
        "container runtime: apptainer (default) or pyxis",
        "NAME",
    )
    live: bool = _field(
        values.flag,
        False,
        "run the code as it is at each start, and not as it was at the submission",
    )
    stage_code: str = _field(
        values.string,
        "",
        "folder that each host copies to its own disk; the ranks start in it",
        "DIR",
    )
    stage_environment: str = _field(
        values.string,
        "",
        "archive of an environment that each host unpacks on its own disk",
        "FILE.tar",
    )
    stage_data: str = _field(
        values.string,
        "",
        "folder that each host copies to its own disk; --data with only its name means the copy",
        "DIR",
    )
    extra: Mapping[str, str | bool] = _field(values.extra, {}, "other options of sbatch")

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
        if not problems:
            problems = list(self._contradictions())
        if problems:
            raise complaint(problems)

    @property
    def gpus(self) -> int:
        """The number of GPUs of each node."""
        return units.gpu_count(self.gpus_per_node)

    @property
    def staged(self) -> bool:
        """Whether the hosts copy anything to their own disks."""
        return bool(self.stage_code or self.stage_environment or self.stage_data)

    @property
    def tasks(self) -> int:
        """The number of ranks on each node."""
        return self.tasks_per_node or self.gpus or 1

    @property
    def signal_seconds(self) -> int:
        """Save margin: seconds from the signal to the end of the time; 0 for no signal."""
        if self.signal_time is not None:
            return self.signal_time
        return min(_SIGNAL_SECONDS, units.seconds(self.time) // 2) if self.time else _SIGNAL_SECONDS

    @property
    def title(self) -> str:
        """The job's name: as given, else the name of the script, module or function."""
        if self.name:
            return self.name
        if self.function:
            return self.function.rpartition(":")[2]
        candidates = [
            argument for argument in self.command if argument.endswith(".py")
        ] or self.command[:1]
        if len(self.command) > 2 and self.command[1] == "-m":
            candidates = [self.command[2].rpartition(".")[2]]
        plain = re.sub(r"[^\w.-]", "_", os.path.basename(candidates[0])) if candidates else ""
        return plain.removesuffix(".py")[: values.LONGEST_NAME] or "job"

    @property
    def indices(self) -> str:
        """The indices of the array or sweep; empty for other jobs."""
        return f"0-{len(self.sweep) - 1}" if self.sweep else self.array

    @property
    def argv(self) -> tuple[str, ...]:
        """Program and arguments of a rank; empty without a command and a function."""
        backend = ("--backend", self.backend) if self.backend else ()
        if self.function:
            module, _, function = self.function.partition(":")
            return ("python", "-c", f"import {module}; {module}.{function}()", *backend)
        return (*self.command, *backend) if self.command else ()

    def _contradictions(self) -> Sequence[tuple[str, str]]:
        """Return contradictions between fields: what was found, what was expected."""
        problems = []
        for name, other in (
            ("command", "function"), ("array", "sweep"), ("venv", "conda"),
            ("venv", "stage_environment"), ("conda", "stage_environment"),
            ("container", "venv"), ("container", "conda"), ("container", "stage_environment"),
            ("container", "elastic"),
        ):  # fmt: skip
            if getattr(self, name) and getattr(self, other):
                problems.append((f"{name} and {other}", "one of them"))
        for name, other_name, is_set in (
            ("throttle", "array or sweep", self.indices),
            ("container_runtime", "container", self.container),
            ("max_restarts", "requeue", self.requeue),
            ("requeue_plain", "requeue", self.requeue),
        ):
            if getattr(self, name) and not is_set:
                problems.append((f"{name} without {other_name}", "both"))
        problems += [
            (found_text, expected) for violated, found_text, expected in self._rules() if violated
        ]
        return problems

    def _rules(self) -> Sequence[tuple[object, str, str]]:
        """Return rules as tuples: whether violated, what was found, what was expected."""
        alone = self.launcher == "none" or self.backend == "dataparallel"
        return (
            (
                self.gpus and self.tasks != self.gpus and not alone,
                f"tasks_per_node = {self.tasks} with {self.gpus} GPUs on each node",
                f"a rank for each GPU: tasks_per_node = {self.gpus}, or none",
            ),
            (
                self.elastic and self.launcher != "hpctrain",
                f"elastic with launcher = {self.launcher}",
                "launcher = hpctrain",
            ),
            (
                self.container and self.launcher == "none",
                f"container with launcher = {self.launcher}",
                "hpctrain or srun",
            ),
            (
                self.container and self.launcher == "srun" and self.container_runtime != "pyxis",
                "container with launcher = srun",
                "container_runtime = pyxis, or launcher = hpctrain",
            ),
            (
                self.staged and (self.launcher != "hpctrain" or self.container_runtime == "pyxis"),
                "stage_code, stage_environment or stage_data with another launcher than hpctrain",
                "launcher = hpctrain",
            ),
            (
                self.container and set(",:") & set(self.run_dir),
                f"run_dir = {_shown(self.run_dir)} in a container",
                "a path without , and :",
            ),
            (
                self.stage_environment and not _TAR.search(self.stage_environment),
                f"stage_environment = {_shown(self.stage_environment)}",
                "a tar archive, such as env.tar.gz",
            ),
            (
                self.stage_data and os.path.basename(self.stage_data.rstrip("/")) in _NO_NAMES,
                f"stage_data = {_shown(self.stage_data)}",
                "a folder by its name, as that is the name of the copy",
            ),
            (
                self.stage_data and env_vars.DATA in self.environment,
                f"stage_data and {env_vars.DATA}",
                "one of them, as stage_data sets this variable",
            ),
            (
                self.time and self.signal_seconds >= units.seconds(self.time),
                f"signal_time = {self.signal_seconds} and time = {self.time}",
                "less than the whole time, in seconds",
            ),
        )


def names() -> list[str]:
    """Return the names of all fields."""
    return [field.name for field in fields(JobSpec)]


def unknown(given: Sequence[str]) -> list[tuple[str, str]]:
    """Return a problem for each name that is no field; the last one lists all fields."""
    problems = []
    for name in given:
        if name not in names():
            replacement = values.OWN_OPTIONS.get(str(name).replace("_", "-")) or _OTHER_NAMES.get(
                str(name)
            )
            problems.append(
                (_shown(name), replacement or nearest(str(name), names()) or "another name")
            )
    if problems:
        problems[-1] = (problems[-1][0], f"{problems[-1][1]}; all names: {', '.join(names())}")
    return problems


def complaint(problems: Sequence[tuple[str, str]], source: str = "") -> UsageError:
    """Return an error with all problems: what was found and what was expected for each."""
    lines = "".join(f"\n  {found}\n    expected: {expected}" for found, expected in problems)
    count = (
        "a value of the job is" if len(problems) == 1 else f"{len(problems)} values of the job are"
    )
    return UsageError("HT801", f"{source + ': ' if source else ''}{count} invalid:{lines}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
