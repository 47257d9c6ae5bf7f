"""Table of the training options."""

import argparse
import dataclasses
import os
from collections.abc import Collection, Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import Any

from hpctrain import backends
from hpctrain.arguments.groups import COUNT, GROUPS, Group, positive
from hpctrain.arguments.kinds import Number, check, option, shown
from hpctrain.arguments.parser import marked
from hpctrain.cluster.launchers import LONGEST_TIMEOUT
from hpctrain.cluster.texts import similar
from hpctrain.errors import UsageError
from hpctrain.precision import PRECISIONS

__all__ = ["DEFAULT_BATCH_SIZE", "Given", "Options", "foreign_names", "named", "names_of"]

DEFAULT_BATCH_SIZE = 32

# Where a script has options and values of its own, besides keyword arguments.
Given = argparse.Namespace | MutableMapping[str, Any] | None


def named(given: Given) -> MutableMapping[str, Any]:
    """Return the values of a command line or a dict by name; a change of the result changes it.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, argparse.Namespace):
        return vars(given)
    if given is None or isinstance(given, MutableMapping):
        return {} if given is None else given
    raise UsageError("HT501.wrong-type", type=type(given).__name__)


def names_of(given: Given) -> Set[str]:
    """Return the names of the values that are for hpctrain: all of a dict, and marked ones."""
    if isinstance(given, argparse.Namespace):
        return (marked(given) or frozenset()) & vars(given).keys()
    return named(given).keys()


def foreign_names(given: Given) -> list[str]:
    """Return the values of another parser's command line that are named like options, sorted."""
    if not isinstance(given, argparse.Namespace) or marked(given) is not None:
        return []
    return sorted({field.name for field in dataclasses.fields(Options)} & vars(given).keys())


def _unknown(name: str, known: Collection[str], in_dict: bool) -> UsageError:
    corrections = [f"{near}=…" for near in similar(name, known, 2)]
    key = "HT501.unknown-name-in-dict" if in_dict else "HT501.unknown-keyword"
    return UsageError(key, name=name, known=", ".join(known), corrections=corrections)


# Types of the values.
FROM_ZERO = Number("a whole number from 0 on", "N", least=0)
seconds = Number(
    f"a number above 0, and at most {LONGEST_TIMEOUT:.0f} seconds",
    "S",
    above=0.0,
    below=LONGEST_TIMEOUT + 1.0,
)
workers = Number("a whole number from 0 on, or auto", "N|auto", least=0, literal="auto")
loss_scale = Number("a number above 0, or dynamic", "X|dynamic", above=0.0, literal="dynamic")

# Options that may differ between hosts, or that rank 0 decides for all ranks.
_MAY_DIFFER = {
    *("run_dir", "resume", "resume_from", "workers", "start_timeout", "timeout"),
    *("profile", "track"),
}


def _settings(name: str) -> Any:
    """Return the field of the settings of a backend."""
    group = GROUPS[name]
    return option(None, group.help, group, metavar="SETTING[=VALUE],…")


@dataclass(frozen=True, slots=True)
class Options:
    """Training options: each field is a keyword of `Session`, and most are command-line options.

    Session reads no other names. So an option exists if it concerns the launch and the run of any
    script; what a script decides itself, such as its learning rate, is an argument of the script.
    """

    run_dir: str | None = option(
        None,
        "run directory (default: $HPCTRAIN_RUN_DIR, else runs/NAME-JOBID, else "
        "runs/NAME-DATE-TIME)",
        metavar="DIR",
    )
    resume: bool | None = option(
        None,
        "resume from the newest complete checkpoint, or start from the beginning if there is none",
        bool,
    )
    resume_from: str | None = option(
        None,
        "run directory, or one of its checkpoints, to begin with if RUN_DIR has no checkpoint",
        metavar="DIR",
    )
    restore: str = option(
        "all",
        "what to take from --resume-from: all, all-but-optimizer, or model; with ,step=0 the run "
        "counts from step 0",
        choices=[
            f"{what}{step}"
            for step in ("", ",step=0")
            for what in ("all", "all-but-optimizer", "model")
        ],
        metavar="WHAT[,step=0]",
    )
    elastic: bool = option(
        False,
        "continue with another number of ranks if some hosts are lost: resumes by default, and "
        "needs --global-batch",
    )
    device: str = option(
        "auto",
        "device of each rank (auto: a GPU of CUDA or ROCm; the GPU of a Mac, mps, for one rank; "
        "else the CPU)",
        choices=("auto", "cpu", "cuda", "mps"),
    )
    backend: str = option(
        "auto",
        "communication backend (auto: ddp for several ranks)",
        choices=("auto", *backends.names()),
    )
    precision: str = option(
        "auto",
        "numeric precision (auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPUs)",
        choices=("auto", *PRECISIONS),
    )
    loss_scale: float | str | None = option(
        None,
        "loss scale of fp16 and O0 to O3: a number, or dynamic (default: dynamic; 1 for O0 and O3)",
        loss_scale,
    )
    keep_batchnorm_fp32: bool | None = option(
        None, "keep batch norm in fp32 in O2 and O3 (default: only in O2)", bool
    )
    max_nonfinite: int = option(
        25,
        "number of consecutive steps with an overflow or a non-finite loss that ends the run",
        COUNT,
        metavar="STEPS",
    )
    check_replicas_every: int | None = option(
        None,
        "steps between two comparisons of weights and optimizer states between the ranks, "
        "besides those at checkpoints; 0 for none (default: a distance at which they take at "
        "most half a percent of the time)",
        FROM_ZERO,
        metavar="STEPS",
    )
    global_batch: int | None = option(None, "samples per optimizer step, over all ranks", COUNT)
    batch_size: int | None = option(
        None,
        "samples per micro-batch, on one rank "
        f"(default: {DEFAULT_BATCH_SIZE} if --global-batch is not given)",
        COUNT,
    )
    accumulate: int | None = option(
        None,
        "micro-batches per optimizer step on one rank (default: computed from the batch sizes)",
        COUNT,
    )
    epochs: int | None = option(None, "number of epochs", COUNT)
    max_steps: int | None = option(
        None, "number of optimizer steps; without --epochs, as many epochs as needed", COUNT
    )
    seed: int = option(0, "random seed for weights, sample order and augmentation", FROM_ZERO)
    seed_everything: bool = option(
        True,
        "seed the generators of Python and NumPy as well as torch's: the same on all ranks "
        "before run.batches, different on each rank from then on",
        only_keyword=True,
    )
    handle_signals: bool = option(
        True,
        "take SIGUSR1, SIGUSR2, SIGTERM and Ctrl-C as requests to stop; without it, a stop "
        "file and the end of the job's time still are",
        only_keyword=True,
    )
    report_errors: bool = option(
        True,
        "set sys.excepthook, which prints an error of hpctrain once, with its fix",
        only_keyword=True,
    )
    deterministic: bool = option(False, "make runs repeat bit by bit; slower on GPUs")
    same_data: bool = option(
        False,
        "allow the script's own loader to give several ranks the same batches",
        only_keyword=True,
    )
    workers: int | str = option(
        0, "loader processes per rank; auto: one less than the cores of a rank", workers
    )
    clip_norm: float | None = option(
        None, "maximum norm of the gradients", positive, only_keyword=True
    )
    clip_value: float | None = option(
        None, "maximum absolute value of each gradient element", positive, only_keyword=True
    )
    sync_batchnorm: bool = option(False, "compute batch norm over the micro-batches of all ranks")
    activation_checkpointing: bool = option(
        False, "compute the activations of the model's blocks again in the backward pass"
    )
    channels_last: bool | None = option(
        None,
        "channels-last memory format of images and convolutions (default: on for GPUs in bf16, "
        "fp16, O1 to O3)",
        bool,
    )
    compile: bool = option(False, "compile models (torch.compile)")
    log_every: int = option(10, "steps between two rows of metrics", COUNT, metavar="STEPS")
    checkpoint_every: int | None = option(
        None,
        "steps between two checkpoints, besides the end of each epoch (default, without "
        "--checkpoint-minutes: saving takes at most half a percent of the time, and at most 10 "
        "minutes pass between two)",
        COUNT,
        metavar="STEPS",
    )
    checkpoint_minutes: float | None = option(
        None,
        "minutes between two checkpoints, besides the end of each epoch",
        positive,
        metavar="M",
    )
    keep_checkpoints: int = option(3, "number of newest checkpoints to keep", COUNT)
    checkpoint_frozen: bool = option(
        True,
        "save frozen parameters in checkpoints; without them, a resume takes those of the script, "
        "and compares them",
    )
    keep_best: str | None = option(
        None,
        "metric, such as top1, whose best checkpoint is kept as well (lower is better if the "
        "name ends in loss)",
        metavar="NAME",
    )
    track: str | None = option(
        None,
        "experiment trackers that get the metrics, in addition to metrics.jsonl: tensorboard, "
        "wandb, mlflow, another package's, or several with commas",
        metavar="NAME[,NAME]",
    )
    profile: str | None = option(
        None, "steps to trace into RUN_DIR/profile: from step A until before step B", metavar="A:B"
    )
    start_timeout: float = option(300.0, "seconds to wait for all ranks", seconds)
    timeout: float = option(
        1800.0, "seconds that a step may take; a certain hang ends sooner", seconds
    )

    ddp: str | None = _settings("ddp")
    fsdp: str | None = _settings("fsdp")
    horovod: str | None = _settings("horovod")

    @classmethod
    def of(cls, given: Given, keywords: Mapping[str, Any]) -> "Options":
        """Return the options of a parsed command line or a dict, overridden by keyword arguments.

        An option that is not there has its default. Of a command line, only what a parser of
        `hpctrain.options()` has added counts.

        Raises:
            UsageError: a name in the dict or a keyword is not an option, or the option does not
                accept its value.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values = {name: named(given)[name] for name in names_of(given)}
        values.update(keywords)
        for name, value in values.items():
            if name not in fields:
                raise _unknown(name, fields, in_dict=name not in keywords)
            kind = fields[name].metadata.get("type")
            if isinstance(kind, Group):
                values[name] = kind.text(value)
            elif isinstance(value, os.PathLike):
                values[name] = os.fspath(value)
            check(fields[name], values[name])
        return cls(**values)

    def of_backend(self, name: str) -> dict[str, Any]:
        """Return the values of all settings of one backend, by name.

        Raises:
            UsageError: settings of another backend were given, which `ignored` does not have.
        """
        family, ignored = backends.options_of(name), self.ignored(name)
        for other in GROUPS:
            settings = getattr(self, other)
            if settings and other != family and other not in ignored:
                chosen = "HT503.auto-backend" if self.backend == "auto" else "HT503.other-backend"
                raise UsageError(chosen, group=other, settings=settings, backend=name)
        return self.settings(family) if family in GROUPS else {}

    def ignored(self, name: str) -> dict[str, str]:
        """Return the settings of other backends that a backend does not need, by their option.

        One process needs none, and only ddp has to be told how it exchanges gradients. So one
        command line is for a laptop and a cluster.
        """
        family = backends.options_of(name)
        groups = GROUPS if family not in GROUPS else ["ddp"]
        given = {group: getattr(self, group) for group in groups if group != family}
        return {group: settings for group, settings in given.items() if settings}

    def settings(self, backend: str) -> dict[str, Any]:
        """Return the values of all settings of a backend in `GROUPS`, by name."""
        return GROUPS[backend].values(getattr(self, backend))

    def deciding(self) -> dict[str, Any]:
        """Return, by flag, the options that affect the numbers: they must be equal on all ranks."""
        fields = (field for field in dataclasses.fields(self) if field.name not in _MAY_DIFFER)
        return {shown(field): getattr(self, field.name) for field in fields}
