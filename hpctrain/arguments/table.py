"""Table of the training options."""

import argparse
import dataclasses
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from hpctrain import backends
from hpctrain.arguments.kinds import (
    COUNT,
    FROM_ZERO,
    check,
    fraction,
    loss_scale,
    not_negative,
    option,
    positive,
    seconds,
    workers,
)
from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError
from hpctrain.precision import PRECISIONS

__all__ = ["DEFAULT_BATCH_SIZE", "Given", "Options", "named"]

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
    raise UsageError(
        "HT501",
        f"hpctrain.Session() with a {type(given).__name__}",
        "a parsed command line, a dict, or keyword arguments",
        "hpctrain.Session(parser.parse_args())",
        "hpctrain.Session(vars(config))",
    )


# Options that may differ between hosts, or that rank 0 decides for all ranks.
_MAY_DIFFER = {
    *("data", "download", "run_dir", "resume", "workers", "start_timeout", "timeout"),
    *("profile", "track"),
}


# An option is `common` if it concerns the start and the run of any script: ranks, precision,
# batches, length, seed, run directory, checkpoints, log, time limits. So `--help` has two screens.
# The others are for `hpctrain.options(recipe=True)`: what many scripts do themselves, with options
# of their own of these names (data, rates, decay, averages), and what few people change.
@dataclass(frozen=True, slots=True)
class Options:
    """Training options. Each field is a command-line option and a keyword argument of `Session`."""

    data: str | None = option(
        "--data",
        None,
        "data set: a folder, or a name: digits, fashion-mnist, mnist, "
        "synthetic. A name is searched for in $HPCTRAIN_DATA, then in this "
        "folder, then in /usr/share/datasets",
        metavar="PATH|NAME",
        parsed="digits",  # on the command line alone, as a Session itself does not read data
    )
    download: bool = option(
        "--download", False, "download the data set if it is missing", action="store_true"
    )
    run_dir: str | None = option(
        "--run-dir",
        None,
        "run directory (default: $HPCTRAIN_RUN_DIR, else runs/NAME-JOBID, "
        "else runs/NAME-DATE-TIME)",
        metavar="DIR",
        common=True,
    )
    resume: bool | None = option(
        "--resume",
        None,
        "resume from the newest complete checkpoint, or start from the beginning if there is none",
        action=argparse.BooleanOptionalAction,
        common=True,
    )
    init_from: str | None = option(
        "--init-from",
        None,
        "initial weights of the models: a file of hpctrain export or torch.save",
        metavar="FILE",
    )
    init_skip: str | None = option(
        "--init-skip",
        None,
        "weights that --init-from leaves as the script made them, such as 'fc.*'; several patterns "
        "with commas",
        metavar="PATTERNS",
    )
    elastic: bool = option(
        "--elastic",
        False,
        "continue with another number of ranks if some hosts are lost: resumes by default, and "
        "needs --global-batch",
        action="store_true",
        common=True,
    )
    backend: str = option(
        "--backend",
        "auto",
        "communication backend (auto: ddp for several ranks)",
        choices=("auto", *backends.names()),
        common=True,
    )
    precision: str = option(
        "--precision",
        "auto",
        "numeric precision (auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPUs)",
        choices=("auto", *PRECISIONS),
        common=True,
    )
    loss_scale: float | str | None = option(
        "--loss-scale",
        None,
        "loss scale of fp16 and O0 to O3: a number, or dynamic (default: dynamic; 1 for O0 and O3)",
        loss_scale,
        metavar="X|dynamic",
    )
    keep_batchnorm_fp32: bool | None = option(
        "--keep-batchnorm-fp32",
        None,
        "keep batch norm in fp32 in O2 and O3 (default: only in O2)",
        action=argparse.BooleanOptionalAction,
    )
    max_nonfinite: int = option(
        "--max-nonfinite",
        25,
        "number of consecutive steps with an overflow or a non-finite loss that ends the run",
        COUNT,
        metavar="STEPS",
    )
    check_replicas_every: int | None = option(
        "--check-replicas-every",
        None,
        "steps between two comparisons of weights and optimizer states between the ranks, besides "
        "those at checkpoints; 0 for none (default: a distance at which they take at most half a "
        "percent of the time)",
        FROM_ZERO,
        metavar="STEPS",
    )
    global_batch: int | None = option(
        "--global-batch",
        None,
        "samples per optimizer step, over all ranks",
        COUNT,
        metavar="N",
        common=True,
    )
    batch_size: int | None = option(
        "--batch-size",
        None,
        "samples per micro-batch, on one "
        f"rank (default: {DEFAULT_BATCH_SIZE} if --global-batch "
        "is not given)",
        COUNT,
        metavar="N",
        common=True,
    )
    accumulate: int | None = option(
        "--accumulate",
        None,
        "micro-batches per optimizer step on one rank (default: computed from the batch sizes)",
        COUNT,
        metavar="N",
        common=True,
    )
    epochs: int | None = option(
        "--epochs",
        None,
        "number of epochs",
        COUNT,
        metavar="N",
        common=True,
    )
    max_steps: int | None = option(
        "--max-steps",
        None,
        "number of optimizer steps; without --epochs, as many epochs as needed",
        COUNT,
        metavar="N",
        common=True,
    )
    seed: int = option(
        "--seed",
        0,
        "random seed for weights, sample order and augmentation",
        FROM_ZERO,
        metavar="N",
        common=True,
    )
    seed_everything: bool = option(
        "--seed-everything",
        True,
        "seed the generators of Python and NumPy as well as torch's: the same on all ranks before "
        "run.batches, different on each rank from then on",
        action=argparse.BooleanOptionalAction,
    )
    handle_signals: bool = option(
        "--handle-signals",
        True,
        "take SIGUSR1, SIGUSR2, SIGTERM and Ctrl-C as requests to stop; without it, a stop "
        "file and the end of the job's time still are",
        action=argparse.BooleanOptionalAction,
    )
    report_errors: bool = option(
        "--report-errors",
        True,
        "set sys.excepthook, which prints an error of hpctrain once, with its fix",
        action=argparse.BooleanOptionalAction,
    )
    deterministic: bool = option(
        "--deterministic",
        False,
        "make runs repeat bit by bit; slower on GPUs",
        action="store_true",
        common=True,
    )
    same_data: bool = option(
        "--same-data",
        False,
        "allow the script's own loader to give several ranks the same batches",
        action="store_true",
        common=True,
    )
    workers: int | str = option(
        "--workers",
        0,
        "loader processes per rank; auto: one less than the cores of a rank",
        workers,
        metavar="N|auto",
        common=True,
    )
    lr: float = option("--lr", 1e-3, "learning rate", positive, metavar="X")
    lr_scaling: str = option(
        "--lr-scaling",
        "none",
        "scaling rule of the learning rate with global batch / --lr-reference-batch",
        choices=("none", "linear", "sqrt"),
    )
    lr_reference_batch: int = option(
        "--lr-reference-batch", 256, "global batch that --lr is meant for", COUNT, metavar="N"
    )
    lr_warmup_epochs: float = option(
        "--lr-warmup-epochs",
        0.0,
        "warm-up epochs, in which the learning rate grows",
        not_negative,
        metavar="X",
    )
    lr_warmup_steps: int = option(
        "--lr-warmup-steps",
        0,
        "warm-up steps, in place of --lr-warmup-epochs",
        FROM_ZERO,
        metavar="N",
    )
    lr_schedule: str = option(
        "--lr-schedule",
        "constant",
        "learning-rate schedule after warm-up",
        choices=("constant", "cosine", "step", "polynomial"),
    )
    lr_step_epochs: int = option(
        "--lr-step-epochs",
        30,
        "epochs between two steps of --lr-schedule step",
        COUNT,
        metavar="N",
    )
    lr_step_factor: float = option(
        "--lr-step-factor",
        0.1,
        "factor of the learning rate at each step of --lr-schedule step",
        fraction,
        metavar="X",
    )
    lr_power: float = option(
        "--lr-power", 2.0, "exponent of --lr-schedule polynomial", positive, metavar="X"
    )
    lr_min: float = option(
        "--lr-min",
        0.0,
        "least learning rate of --lr-schedule cosine and polynomial, reached at the end",
        not_negative,
        metavar="X",
    )
    decay: str = option(
        "--decay",
        "all",
        "parameters with weight decay: all, or only weights, without norms and biases",
        choices=("all", "weights"),
    )
    clip_norm: float | None = option(
        "--clip-norm", None, "maximum norm of the gradients", positive, metavar="X"
    )
    clip_value: float | None = option(
        "--clip-value",
        None,
        "maximum absolute value of each gradient element",
        positive,
        metavar="X",
    )
    ema: float | None = option(
        "--ema",
        None,
        "decay of the moving average of the weights (default: no average)",
        fraction,
        metavar="X",
    )
    sync_batchnorm: bool = option(
        "--sync-batchnorm",
        False,
        "compute batch norm over the micro-batches of all ranks",
        action="store_true",
    )
    channels_last: bool | None = option(
        "--channels-last",
        None,
        "channels-last memory format of images and convolutions (default: on for GPUs in bf16, "
        "fp16, O1 to O3)",
        action=argparse.BooleanOptionalAction,
    )
    compile: bool = option(
        "--compile",
        False,
        "compile models (torch.compile)",
        action="store_true",
        common=True,
    )
    log_every: int = option(
        "--log-every",
        10,
        "steps between two rows of metrics",
        COUNT,
        metavar="STEPS",
        common=True,
    )
    checkpoint_every: int | None = option(
        "--checkpoint-every",
        None,
        "steps between two checkpoints, in addition to the end of each epoch",
        COUNT,
        metavar="STEPS",
        common=True,
    )
    memory_checkpoint_every: int = option(
        "--memory-checkpoint-every",
        0,
        "steps between copies of the state in memory, for restarts",
        FROM_ZERO,
        metavar="STEPS",
        common=True,
    )
    checkpoint_minutes: float | None = option(
        "--checkpoint-minutes",
        None,
        "minutes between two checkpoints",
        positive,
        metavar="M",
        common=True,
    )
    keep_checkpoints: int = option(
        "--keep-checkpoints",
        3,
        "number of newest checkpoints to keep",
        COUNT,
        metavar="N",
        common=True,
    )
    keep_best: str | None = option(
        "--keep-best",
        None,
        "metric, such as top1, whose best checkpoint is kept as well (lower is better if the name "
        "ends in loss)",
        metavar="NAME",
        common=True,
    )
    track: str | None = option(
        "--track",
        None,
        "experiment trackers that get the metrics, in addition to metrics.jsonl: tensorboard, "
        "wandb, mlflow, another package's, or several with commas",
        metavar="NAME[,NAME]",
        common=True,
    )
    profile: str | None = option(
        "--profile",
        None,
        "steps to trace into RUN_DIR/profile: from step A until before step B",
        metavar="A:B",
        common=True,
    )
    start_timeout: float = option(
        "--start-timeout",
        300.0,
        "seconds to wait for all ranks",
        seconds,
        metavar="S",
        common=True,
    )
    timeout: float = option(
        "--timeout",
        1800.0,
        "seconds that a step may take; a certain hang ends sooner",
        seconds,
        metavar="S",
        common=True,
    )

    ddp_compression: str = option(
        "--ddp-compression",
        "none",
        "gradient compression",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    ddp_powersgd_rank: int = option(
        "--ddp-powersgd-rank", 1, "rank of PowerSGD's approximation", COUNT, metavar="N"
    )
    ddp_powersgd_start: int = option(
        "--ddp-powersgd-start", 1000, "steps before PowerSGD starts", COUNT, metavar="STEPS"
    )
    ddp_bucket_mb: float = option(
        "--ddp-bucket-mb", 25.0, "MiB of gradients per message", positive, metavar="X"
    )
    ddp_static_graph: bool = option(
        "--ddp-static-graph",
        False,
        "declare that every step uses the same parameters",
        action="store_true",
    )
    ddp_find_unused_parameters: bool = option(
        "--ddp-find-unused-parameters",
        False,
        "look in every step for parameters that the loss does not use, such as skipped layers",
        action="store_true",
        common=True,
    )
    ddp_gradient_as_bucket_view: bool = option(
        "--ddp-gradient-as-bucket-view",
        True,
        "store gradients in the message buffers, without a copy",
        action=argparse.BooleanOptionalAction,
    )
    horovod_op: str = option(
        "--horovod-op",
        "average",
        "reduction of the gradients over the ranks",
        choices=("average", "sum", "adasum"),
        common=True,
    )
    horovod_compression: str = option(
        "--horovod-compression", "none", "gradient compression", choices=("none", "fp16")
    )
    horovod_gradient_predivide_factor: float = option(
        "--horovod-gradient-predivide-factor",
        1.0,
        "part of the average's divisor that is applied before the sum",
        positive,
        metavar="X",
    )
    horovod_groups: int | None = option(
        "--horovod-groups", None, "number of messages for all gradients", COUNT, metavar="N"
    )
    horovod_sparse_as_dense: bool = option(
        "--horovod-sparse-as-dense", False, "send sparse gradients as dense", action="store_true"
    )

    @classmethod
    def of(cls, given: Given, keywords: dict[str, Any]) -> "Options":
        """Return the options of a parsed command line or a dict, overridden by keyword arguments.

        An option that is not there has its default. Names of no option are left to the script.

        Raises:
            UsageError: a keyword is not an option, the option does not accept its value, or the
                options of the learning rate contradict each other or the end of the training.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in keywords:
            if name not in fields:
                near = nearest(name, fields)
                raise UsageError(
                    "HT501",
                    f"{name}= is no option of a Session",
                    f"one of {', '.join(fields)}",
                    f"{near}=…" if near else "",
                )
        known = {name: value for name, value in named(given).items() if name in fields}
        values = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in {**known, **keywords}.items()
        }
        for name, value in values.items():
            check(fields[name], value)
        opts = cls(**values)
        opts._check_rates()
        return opts

    def _check_rates(self) -> None:
        """Check the learning rate here, before the run has a directory.

        The schedule also compares epochs with steps, once it knows the length of an epoch.
        """
        for warmup, end, unit in (
            (self.lr_warmup_epochs, self.epochs, "epochs"),
            (self.lr_warmup_steps, self.max_steps, "steps"),
        ):
            limit = "--epochs" if unit == "epochs" else "--max-steps"
            if end is not None and warmup >= end:
                raise UsageError(
                    "HT411",
                    f"--lr-warmup-{unit} {warmup:g} with {limit} {end}",
                    "a warm-up that is shorter than the training",
                    f"--lr-warmup-{unit} 0",
                    f"a larger {limit}",
                )
        if self.lr_warmup_epochs and self.lr_warmup_steps:
            raise UsageError(
                "HT411",
                f"--lr-warmup-epochs {self.lr_warmup_epochs:g} and "
                f"--lr-warmup-steps {self.lr_warmup_steps}",
                "one length of the warm-up",
                "--lr-warmup-epochs 0",
                "--lr-warmup-steps 0",
            )
        if self.lr_min and self.lr_schedule == "step":
            raise UsageError(
                "HT406",
                f"--lr-min {self.lr_min:g} with --lr-schedule step",
                "a schedule that ends at the least rate",
                "--lr-schedule cosine",
                "--lr-schedule polynomial",
                "--lr-min 0",
            )

    @property
    def sets_rates(self) -> bool:
        """Whether the options set the learning rate of each step."""
        return bool(self.lr_schedule != "constant" or self.lr_warmup_epochs or self.lr_warmup_steps)

    def of_backend(self, name: str) -> dict[str, Any]:
        """Return the options of one backend, by name without the backend's prefix.

        Raises:
            UsageError: an option of another backend was given.
        """
        own, family = {}, backends.options_of(name)
        for field in dataclasses.fields(self):
            backend, _, rest = field.name.partition("_")
            value = getattr(self, field.name)
            if backend == family and rest:
                own[rest] = value
            elif backend in backends.BACKENDS and rest and value != field.default:
                raise UsageError(
                    "HT503",
                    f"{field.metadata['flag']} with --backend {self.backend}"
                    + (f", which is {name} here" if self.backend == "auto" else ""),
                    f"--backend {backend}",
                    f"--backend {backend}",
                    f"leave {field.metadata['flag']} out",
                )
        return own

    def deciding(self) -> dict[str, Any]:
        """Return, by flag, the options that affect the numbers: they must be equal on all ranks."""
        fields = [f for f in dataclasses.fields(self) if f.name not in _MAY_DIFFER]
        return {field.metadata["flag"]: getattr(self, field.name) for field in fields}
