"""Table of the training options."""

import argparse
import dataclasses
import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from hpctrain import backends
from hpctrain.arguments.kinds import Number, check, common, flag, option
from hpctrain.cluster.launchers import LONGEST_TIMEOUT
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


# Types of the values.
COUNT = Number("a whole number from 1 on", "N", least=1)
FROM_ZERO = Number("a whole number from 0 on", "N", least=0)
positive = Number("a number above 0", above=0.0)
not_negative = Number("a number from 0 on", above=math.nextafter(0.0, -1.0))
fraction = Number("a number above 0 and below 1", above=0.0, below=1.0)
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
        None,
        "data set: a folder, or a name: digits, fashion-mnist, mnist, synthetic. A name is "
        "searched for in $HPCTRAIN_DATA, then in this folder, then in /usr/share/datasets",
        metavar="PATH|NAME",
        parsed="digits",  # on the command line alone, as a Session itself does not read data
    )
    download: bool = option(False, "download the data set if it is missing")
    run_dir: str | None = common(
        None,
        "run directory (default: $HPCTRAIN_RUN_DIR, else runs/NAME-JOBID, else "
        "runs/NAME-DATE-TIME)",
        metavar="DIR",
    )
    resume: bool | None = common(
        None,
        "resume from the newest complete checkpoint, or start from the beginning if there is none",
        bool,
    )
    elastic: bool = common(
        False,
        "continue with another number of ranks if some hosts are lost: resumes by default, and "
        "needs --global-batch",
    )
    backend: str = common(
        "auto",
        "communication backend (auto: ddp for several ranks)",
        choices=("auto", *backends.names()),
    )
    precision: str = common(
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
    global_batch: int | None = common(None, "samples per optimizer step, over all ranks", COUNT)
    batch_size: int | None = common(
        None,
        "samples per micro-batch, on one rank "
        f"(default: {DEFAULT_BATCH_SIZE} if --global-batch is not given)",
        COUNT,
    )
    accumulate: int | None = common(
        None,
        "micro-batches per optimizer step on one rank (default: computed from the batch sizes)",
        COUNT,
    )
    epochs: int | None = common(None, "number of epochs", COUNT)
    max_steps: int | None = common(
        None, "number of optimizer steps; without --epochs, as many epochs as needed", COUNT
    )
    seed: int = common(0, "random seed for weights, sample order and augmentation", FROM_ZERO)
    seed_everything: bool = option(
        True,
        "seed the generators of Python and NumPy as well as torch's: the same on all ranks "
        "before run.batches, different on each rank from then on",
    )
    handle_signals: bool = option(
        True,
        "take SIGUSR1, SIGUSR2, SIGTERM and Ctrl-C as requests to stop; without it, a stop "
        "file and the end of the job's time still are",
    )
    report_errors: bool = option(
        True, "set sys.excepthook, which prints an error of hpctrain once, with its fix"
    )
    deterministic: bool = common(False, "make runs repeat bit by bit; slower on GPUs")
    same_data: bool = common(
        False, "allow the script's own loader to give several ranks the same batches"
    )
    workers: int | str = common(
        0, "loader processes per rank; auto: one less than the cores of a rank", workers
    )
    lr: float = option(1e-3, "learning rate", positive)
    lr_scaling: str = option(
        "none",
        "scaling rule of the learning rate with global batch / --lr-reference-batch",
        choices=("none", "linear", "sqrt"),
    )
    lr_reference_batch: int = option(256, "global batch that --lr is meant for", COUNT)
    lr_warmup_epochs: float = option(
        0.0, "warm-up epochs, in which the learning rate grows", not_negative
    )
    lr_warmup_steps: int = option(0, "warm-up steps, in place of --lr-warmup-epochs", FROM_ZERO)
    lr_schedule: str = option(
        "constant",
        "learning-rate schedule after warm-up",
        choices=("constant", "cosine", "step", "polynomial"),
    )
    lr_step_epochs: int = option(30, "epochs between two steps of --lr-schedule step", COUNT)
    lr_step_factor: float = option(
        0.1, "factor of the learning rate at each step of --lr-schedule step", fraction
    )
    lr_power: float = option(2.0, "exponent of --lr-schedule polynomial", positive)
    lr_min: float = option(
        0.0,
        "least learning rate of --lr-schedule cosine and polynomial, reached at the end",
        not_negative,
    )
    decay: str = option(
        "all",
        "parameters with weight decay: all, or only weights, without norms and biases",
        choices=("all", "weights"),
    )
    clip_norm: float | None = option(None, "maximum norm of the gradients", positive)
    clip_value: float | None = option(
        None, "maximum absolute value of each gradient element", positive
    )
    ema: float | None = option(
        None, "decay of the moving average of the weights (default: no average)", fraction
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
    compile: bool = common(False, "compile models (torch.compile)")
    log_every: int = common(10, "steps between two rows of metrics", COUNT, metavar="STEPS")
    checkpoint_every: int | None = common(
        None,
        "steps between two checkpoints, in addition to the end of each epoch",
        COUNT,
        metavar="STEPS",
    )
    memory_checkpoint_every: int = common(
        0, "steps between copies of the state in memory, for restarts", FROM_ZERO, metavar="STEPS"
    )
    checkpoint_minutes: float | None = common(
        None, "minutes between two checkpoints", positive, metavar="M"
    )
    keep_checkpoints: int = common(3, "number of newest checkpoints to keep", COUNT)
    keep_best: str | None = common(
        None,
        "metric, such as top1, whose best checkpoint is kept as well (lower is better if the "
        "name ends in loss)",
        metavar="NAME",
    )
    track: str | None = common(
        None,
        "experiment trackers that get the metrics, in addition to metrics.jsonl: tensorboard, "
        "wandb, mlflow, another package's, or several with commas",
        metavar="NAME[,NAME]",
    )
    profile: str | None = common(
        None, "steps to trace into RUN_DIR/profile: from step A until before step B", metavar="A:B"
    )
    start_timeout: float = common(300.0, "seconds to wait for all ranks", seconds)
    timeout: float = common(
        1800.0, "seconds that a step may take; a certain hang ends sooner", seconds
    )

    ddp_compression: str = option(
        "none", "gradient compression", choices=("none", "fp16", "bf16", "powersgd")
    )
    ddp_powersgd_rank: int = option(1, "rank of PowerSGD's approximation", COUNT)
    ddp_powersgd_start: int = option(1000, "steps before PowerSGD starts", COUNT, metavar="STEPS")
    ddp_bucket_mb: float = option(25.0, "MiB of gradients per message", positive)
    ddp_static_graph: bool = option(False, "declare that every step uses the same parameters")
    ddp_find_unused_parameters: bool = common(
        False,
        "look in every step for parameters that the loss does not use, such as skipped layers",
    )
    ddp_gradient_as_bucket_view: bool = option(
        True, "store gradients in the message buffers, without a copy"
    )
    fsdp_blocks: str | None = option(
        None,
        "classes of the modules whose weights are gathered together (default: what the model "
        "repeats in a list)",
        metavar="CLASS[,CLASS]",
    )
    fsdp_reshard: bool = option(True, "free the weights of a block between forward and backward")
    fsdp_hybrid: bool = option(False, "divide the weights within a host, and keep a copy per host")
    fsdp_offload: bool = option(False, "keep weights and optimizer states in the host's memory")
    horovod_op: str = common(
        "average", "reduction of the gradients over the ranks", choices=("average", "sum", "adasum")
    )
    horovod_compression: str = option("none", "gradient compression", choices=("none", "fp16"))
    horovod_gradient_predivide_factor: float = option(
        1.0, "part of the average's divisor that is applied before the sum", positive
    )
    horovod_groups: int | None = option(None, "number of messages for all gradients", COUNT)
    horovod_sparse_as_dense: bool = option(False, "send sparse gradients as dense")

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
        for unit, warmup, limit, end in (
            ("epochs", self.lr_warmup_epochs, "--epochs", self.epochs),
            ("steps", self.lr_warmup_steps, "--max-steps", self.max_steps),
        ):
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
                    f"{flag(field.name)} with --backend {self.backend}"
                    + (f", which is {name} here" if self.backend == "auto" else ""),
                    f"--backend {backend}",
                    f"--backend {backend}",
                    f"leave {flag(field.name)} out",
                )
        return own

    def deciding(self) -> dict[str, Any]:
        """Return, by flag, the options that affect the numbers: they must be equal on all ranks."""
        names = (field.name for field in dataclasses.fields(self))
        return {flag(name): getattr(self, name) for name in names if name not in _MAY_DIFFER}
