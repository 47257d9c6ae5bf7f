"""The table of the training options."""

import argparse
import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any

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
from hpctrain.backends import BACKENDS
from hpctrain.errors import UsageError
from hpctrain.precision import PRECISIONS

__all__ = ["DEFAULT_BATCH_SIZE", "Options"]

DEFAULT_BATCH_SIZE = 32

# What each host may have in its own way, or what rank 0 decides for all.
_MAY_DIFFER = {
    *("data", "download", "run", "resume", "workers", "start_timeout", "timeout"),
    *("profile", "track"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose. Each field is an option and a keyword argument of `Session`."""

    data: str = option(
        "--data",
        "digits",
        "a folder, or a name: digits, fashion-mnist, mnist, "
        "synthetic. Names are sought in $HPCTRAIN_DATA/NAME, then "
        "/usr/share/datasets/NAME",
        metavar="PATH|NAME",
    )
    download: bool = option(
        "--download", False, "fetch a data set that is not there", action="store_true"
    )
    run: str | None = option(
        "--run",
        None,
        "run directory (default: $HPCTRAIN_RUN, else runs/NAME-JOBID, else runs/NAME-DATE-TIME)",
        metavar="DIR",
    )
    resume: bool | None = option(
        "--resume",
        None,
        "go on from the newest whole checkpoint, or from the start when there is none",
        action=argparse.BooleanOptionalAction,
    )
    init_from: str | None = option(
        "--init-from",
        None,
        "weights that the models begin with: of hpctrain export, or of torch.save",
        metavar="FILE",
    )
    elastic: bool = option(
        "--elastic",
        False,
        "go on with another number of ranks, where that of the run is not there any more: resumes "
        "by default, and needs --global-batch",
        action="store_true",
    )
    backend: str = option(
        "--backend", "auto", "how ranks talk (auto: ddp for several)", choices=("auto", *BACKENDS)
    )
    precision: str = option(
        "--precision",
        "auto",
        "how numbers are kept (auto: bf16 on GPUs that have it, fp16 on older ones, fp32 on CPUs)",
        choices=("auto", *PRECISIONS),
    )
    loss_scale: float | str | None = option(
        "--loss-scale",
        None,
        "of fp16 and O0 to O3: a number, or dynamic (default: dynamic; 1 for O0 and O3)",
        loss_scale,
        metavar="X|dynamic",
    )
    keep_batchnorm_fp32: bool | None = option(
        "--keep-batchnorm-fp32",
        None,
        "leave batch norm in fp32 under O2 and O3 (default: under O2)",
        action=argparse.BooleanOptionalAction,
    )
    max_nonfinite: int = option(
        "--max-nonfinite",
        25,
        "steps in a row that may overflow or have no finite loss before the run ends",
        COUNT,
        metavar="STEPS",
    )
    global_batch: int | None = option(
        "--global-batch", None, "samples of one optimizer step, over all ranks", COUNT, metavar="N"
    )
    batch_size: int | None = option(
        "--batch-size",
        None,
        "samples of one micro-batch, on one "
        f"rank (default: {DEFAULT_BATCH_SIZE} where --global-batch "
        "is not given)",
        COUNT,
        metavar="N",
    )
    accumulate: int | None = option(
        "--accumulate",
        None,
        "micro-batches of one step on one rank (default: what the batches need)",
        COUNT,
        metavar="N",
    )
    epochs: int | None = option("--epochs", None, "times through the data", COUNT, metavar="N")
    max_steps: int | None = option(
        "--max-steps",
        None,
        "optimizer steps; without --epochs as many epochs as they need",
        COUNT,
        metavar="N",
    )
    seed: int = option("--seed", 0, "of weights, order and augmentation", FROM_ZERO, metavar="N")
    seed_everything: bool = option(
        "--seed-everything",
        True,
        "seed the generators of Python and NumPy too, as torch's: alike on all ranks before "
        "run.batches, differently on each from there on",
        action=argparse.BooleanOptionalAction,
    )
    deterministic: bool = option(
        "--deterministic", False, "bit-equal repeats; slower on GPUs", action="store_true"
    )
    same_data: bool = option(
        "--same-data",
        False,
        "let a loader of the script's own give several ranks the same batches",
        action="store_true",
    )
    workers: int | str = option(
        "--workers",
        0,
        "loader processes of a rank; auto: the cores of a rank, but one",
        workers,
        metavar="N|auto",
    )
    lr: float = option("--lr", 1e-3, "learning rate", positive, metavar="X")
    lr_scaling: str = option(
        "--lr-scaling",
        "none",
        "of the learning rate with the global batch over that of --lr-reference-batch",
        choices=("none", "linear", "sqrt"),
    )
    lr_reference_batch: int = option(
        "--lr-reference-batch", 256, "global batch that --lr is meant for", COUNT, metavar="N"
    )
    lr_warmup_epochs: float = option(
        "--lr-warmup-epochs",
        0.0,
        "epochs in which the learning rate grows",
        not_negative,
        metavar="X",
    )
    lr_schedule: str = option(
        "--lr-schedule",
        "constant",
        "of the learning rate after the warm-up",
        choices=("constant", "cosine", "step", "polynomial"),
    )
    lr_step_epochs: int = option(
        "--lr-step-epochs",
        30,
        "epochs from one step of --lr-schedule step to the next",
        COUNT,
        metavar="N",
    )
    lr_step_factor: float = option(
        "--lr-step-factor", 0.1, "of each step of --lr-schedule step", fraction, metavar="X"
    )
    lr_power: float = option(
        "--lr-power", 2.0, "of --lr-schedule polynomial", positive, metavar="X"
    )
    decay: str = option(
        "--decay",
        "all",
        "which parameters an optimizer's weight decay reaches: all, or weights alone, without "
        "norms and biases",
        choices=("all", "weights"),
    )
    clip_norm: float | None = option(
        "--clip-norm", None, "largest norm of the gradients", positive, metavar="X"
    )
    clip_value: float | None = option(
        "--clip-value", None, "largest size of an element of the gradients", positive, metavar="X"
    )
    ema: float | None = option(
        "--ema", None, "decay of an average of the weights (default: none)", fraction, metavar="X"
    )
    sync_batchnorm: bool = option(
        "--sync-batchnorm",
        False,
        "batch norm over the micro-batches of all ranks",
        action="store_true",
    )
    channels_last: bool | None = option(
        "--channels-last",
        None,
        "memory format of images and convolutions (default: on GPUs in bf16, fp16, O1 to O3)",
        action=argparse.BooleanOptionalAction,
    )
    compile: bool = option(
        "--compile", False, "compile models (torch.compile)", action="store_true"
    )
    log_every: int = option(
        "--log-every", 10, "steps from one row of metrics to the next", COUNT, metavar="STEPS"
    )
    checkpoint_every: int | None = option(
        "--checkpoint-every",
        None,
        "steps from one checkpoint to the next, besides the end of each epoch",
        COUNT,
        metavar="STEPS",
    )
    checkpoint_minutes: float | None = option(
        "--checkpoint-minutes",
        None,
        "minutes from one checkpoint to the next",
        positive,
        metavar="M",
    )
    keep_checkpoints: int = option(
        "--keep-checkpoints", 3, "how many of the newest are kept", COUNT, metavar="N"
    )
    keep_best: str | None = option(
        "--keep-best",
        None,
        "keep the checkpoint with the best value of this too, such as top1 (lower is better where "
        "the name ends in loss)",
        metavar="NAME",
    )
    track: str | None = option(
        "--track",
        None,
        "where rows of metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, or several "
        "with commas",
        metavar="NAME[,NAME]",
    )
    profile: str | None = option(
        "--profile",
        None,
        "steps from A on and before B are traced, into RUN_DIR/profile",
        metavar="A:B",
    )
    start_timeout: float = option(
        "--start-timeout", 300.0, "seconds to wait for all ranks", seconds, metavar="S"
    )
    timeout: float = option(
        "--timeout",
        1800.0,
        "seconds that a step or a collective may be silent",
        seconds,
        metavar="S",
    )

    ddp_compression: str = option(
        "--ddp-compression",
        "none",
        "of gradients on their way",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    ddp_powersgd_rank: int = option(
        "--ddp-powersgd-rank", 1, "of PowerSGD's approximation", COUNT, metavar="N"
    )
    ddp_powersgd_start: int = option(
        "--ddp-powersgd-start", 1000, "steps before PowerSGD begins", COUNT, metavar="STEPS"
    )
    ddp_bucket_mb: float = option(
        "--ddp-bucket-mb", 25.0, "MiB of gradients in one message", positive, metavar="X"
    )
    ddp_static_graph: bool = option(
        "--ddp-static-graph",
        False,
        "the same parameters are used in every step",
        action="store_true",
    )
    ddp_gradient_as_bucket_view: bool = option(
        "--ddp-gradient-as-bucket-view",
        True,
        "gradients lie in the messages, without a copy",
        action=argparse.BooleanOptionalAction,
    )
    horovod_op: str = option(
        "--horovod-op",
        "average",
        "what becomes of the ranks' gradients",
        choices=("average", "sum", "adasum"),
    )
    horovod_compression: str = option(
        "--horovod-compression", "none", "of gradients on their way", choices=("none", "fp16")
    )
    horovod_gradient_predivide_factor: float = option(
        "--horovod-gradient-predivide-factor",
        1.0,
        "the part of the average that is divided before the sum",
        positive,
        metavar="X",
    )
    horovod_groups: int | None = option(
        "--horovod-groups", None, "messages that carry all gradients", COUNT, metavar="N"
    )
    horovod_sparse_as_dense: bool = option(
        "--horovod-sparse-as-dense", False, "send sparse gradients as dense", action="store_true"
    )

    @classmethod
    def of(cls, namespace: argparse.Namespace | None, keywords: dict[str, Any]) -> "Options":
        """The options of a parsed command line, with keyword arguments over them.

        Raises:
            UsageError: a keyword that is no option, or a value that the option does not take.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in keywords:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1)
                raise UsageError(
                    f"{name}= is no option of a Session",
                    f"one of {', '.join(fields)}",
                    f"{near[0]}=…" if near else "",
                )
        given = {k: v for k, v in vars(namespace or argparse.Namespace()).items() if k in fields}
        values = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in {**given, **keywords}.items()
        }
        for name, value in values.items():
            check(fields[name], value)
        return cls(**values)

    def of_backend(self, name: str) -> dict[str, Any]:
        """The options of one backend, by their names without its own in front.

        Raises:
            UsageError: an option of another backend was given.
        """
        own = {}
        for field in dataclasses.fields(self):
            backend, _, rest = field.name.partition("_")
            value = getattr(self, field.name)
            if backend == name and rest:
                own[rest] = value
            elif backend in BACKENDS and rest and value != field.default:
                raise UsageError(
                    f"{field.metadata['flag']} with --backend {self.backend}"
                    + (f", which is {name} here" if self.backend == "auto" else ""),
                    f"--backend {backend}",
                    f"--backend {backend}, or leave {field.metadata['flag']} out",
                )
        return own

    def deciding(self) -> dict[str, Any]:
        """By flag, the options that have to be the same on all ranks: they decide the numbers."""
        fields = [f for f in dataclasses.fields(self) if f.name not in _MAY_DIFFER]
        return {field.metadata["flag"]: getattr(self, field.name) for field in fields}
