"""The training options: one table, from which come the command line and the keyword arguments.

parser = hpctrain.options()
parser.add_argument("--width", type=int, default=64)
session = hpctrain.Session(parser.parse_args())
session = hpctrain.Session(backend="ddp", precision="bf16")
"""

import argparse
import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any

from hpctrain.backends import BACKENDS
from hpctrain.errors import UsageError
from hpctrain.launchers import LONGEST_TIMEOUT
from hpctrain.precision import PRECISIONS

__all__ = ["Batches", "Options", "options", "plan_batches"]

_DEFAULT_BATCH_SIZE = 32


def _option(
    flag: str, default: Any, text: str, type: Any = str, **more: Any
) -> Any:  # the type of a dataclass field
    """A field of `Options` and how it is spelt on the command line."""
    spec = {"flag": flag, "help": text, **more}
    if "action" not in more:
        spec["type"] = type
    return dataclasses.field(default=default, metadata=spec)


# What each host may have in its own way, or what rank 0 decides for all.
_MAY_DIFFER = {"data", "download", "run", "resume", "workers", "start_timeout", "timeout"}


def _whole(least: int) -> Any:
    """A type for argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    number.__name__ = "whole number"
    number.least = least  # type: ignore[attr-defined]
    return number


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _seconds(text: str) -> float:
    value = _positive(text)
    if value > LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} is above {LONGEST_TIMEOUT:.0f}")
    return value


_positive.__name__, _seconds.__name__ = "number", "number of seconds"  # for argparse's messages
_COUNT = _whole(1)
_FROM_ZERO = _whole(0)


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose. Each field is an option and a keyword argument of `Session`."""

    data: str = _option(
        "--data",
        "digits",
        "a folder, or a name: digits, fashion-mnist, mnist, "
        "synthetic. Names are sought in $HPCTRAIN_DATA/NAME, then "
        "/usr/share/datasets/NAME",
        metavar="PATH|NAME",
    )
    download: bool = _option(
        "--download", False, "fetch a data set that is not there", action="store_true"
    )
    run: str | None = _option(
        "--run",
        None,
        "run directory (default: $HPCTRAIN_RUN, else runs/NAME-JOBID, else runs/NAME-DATE-TIME)",
        metavar="DIR",
    )
    resume: bool | None = _option(
        "--resume",
        None,
        "go on from the newest whole checkpoint, or from the start when there is none",
        action=argparse.BooleanOptionalAction,
    )
    elastic: bool = _option(
        "--elastic",
        False,
        "go on with another number of ranks, where that of the run is not there any more: resumes "
        "by default, and needs --global-batch",
        action="store_true",
    )
    backend: str = _option(
        "--backend", "auto", "how ranks talk (auto: ddp for several)", choices=("auto", *BACKENDS)
    )
    precision: str = _option(
        "--precision", "fp32", "how numbers are kept", choices=tuple(PRECISIONS)
    )
    global_batch: int | None = _option(
        "--global-batch", None, "samples of one optimizer step, over all ranks", _COUNT, metavar="N"
    )
    batch_size: int | None = _option(
        "--batch-size",
        None,
        "samples of one micro-batch, on one "
        f"rank (default: {_DEFAULT_BATCH_SIZE} where --global-batch "
        "is not given)",
        _COUNT,
        metavar="N",
    )
    accumulate: int | None = _option(
        "--accumulate",
        None,
        "micro-batches of one step on one rank (default: what the batches need)",
        _COUNT,
        metavar="N",
    )
    epochs: int | None = _option("--epochs", None, "times through the data", _COUNT, metavar="N")
    max_steps: int | None = _option(
        "--max-steps",
        None,
        "optimizer steps; without --epochs as many epochs as they need",
        _COUNT,
        metavar="N",
    )
    seed: int = _option("--seed", 0, "of weights, order and augmentation", _FROM_ZERO, metavar="N")
    deterministic: bool = _option(
        "--deterministic", False, "bit-equal repeats; slower on GPUs", action="store_true"
    )
    workers: int = _option("--workers", 0, "loader processes of a rank", _FROM_ZERO, metavar="N")
    lr: float = _option("--lr", 1e-3, "learning rate", _positive, metavar="X")
    clip_norm: float | None = _option(
        "--clip-norm", None, "largest norm of the gradients", _positive, metavar="X"
    )
    log_every: int = _option(
        "--log-every", 10, "steps from one row of metrics to the next", _COUNT, metavar="STEPS"
    )
    checkpoint_every: int | None = _option(
        "--checkpoint-every",
        None,
        "steps from one checkpoint to the next, besides the end of each epoch",
        _COUNT,
        metavar="STEPS",
    )
    start_timeout: float = _option(
        "--start-timeout", 300.0, "seconds to wait for all ranks", _seconds, metavar="S"
    )
    timeout: float = _option(
        "--timeout", 1800.0, "seconds that a collective may take", _seconds, metavar="S"
    )

    horovod_op: str = _option(
        "--horovod-op",
        "average",
        "what becomes of the ranks' gradients",
        choices=("average", "sum", "adasum"),
    )
    horovod_compression: str = _option(
        "--horovod-compression", "none", "of gradients on their way", choices=("none", "fp16")
    )
    horovod_gradient_predivide_factor: float = _option(
        "--horovod-gradient-predivide-factor",
        1.0,
        "the part of the average that is divided before the sum",
        _positive,
        metavar="X",
    )
    horovod_groups: int | None = _option(
        "--horovod-groups", None, "messages that carry all gradients", _COUNT, metavar="N"
    )
    horovod_sparse_as_dense: bool = _option(
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
            _check(fields[name], value)
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


def _check(field: Any, value: Any) -> None:
    """Hold a keyword argument to what the command line would take."""
    spec = field.metadata
    choices = spec.get("choices")
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        raise UsageError(
            f"{spec['flag']} {value}",
            f"one of {', '.join(choices)}",
            f"{spec['flag']} {near[0] if near else choices[0]}",
        )
    if value is None and field.default is None:
        return
    kind = spec.get("type")
    least = getattr(kind, "least", None)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if least is not None and not (whole and value >= least):
        raise UsageError(f"{spec['flag']} {value!r}", f"a whole number from {least} on")
    number = whole or isinstance(value, float)
    if kind in (_positive, _seconds) and not (number and 0 < value < float("inf")):
        raise UsageError(f"{spec['flag']} {value!r}", "a number above 0")
    if kind is _seconds and value > LONGEST_TIMEOUT:
        raise UsageError(f"{spec['flag']} {value!r}", f"at most {LONGEST_TIMEOUT:.0f} seconds")
    if "action" in spec and not isinstance(value, bool):
        raise UsageError(f"{spec['flag']} {value!r}", "True or False")
    if kind is str and not isinstance(value, str):
        raise UsageError(f"{spec['flag']} {value!r}", "text")


def options(**parser_arguments: Any) -> argparse.ArgumentParser:
    """A parser with the shared training options; add your own to it.

    Args:
        parser_arguments: for `argparse.ArgumentParser`, such as `description`.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, **parser_arguments)
    group = parser.add_argument_group("training options")
    for field in dataclasses.fields(Options):
        spec = dict(field.metadata)
        flag = spec.pop("flag")
        if field.default not in (None, False):
            spec["help"] += " (default: %(default)s)"
        group.add_argument(flag, dest=field.name, default=field.default, **spec)
    # torch.distributed.launch gives it to every script; `launchers` reads it from there.
    parser.add_argument(
        *("--local_rank", "--local-rank"),
        type=int,
        help=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
    )
    return parser


@dataclass(frozen=True, slots=True)
class Batches:
    """How a step is cut up: `global_batch = batch_size × accumulate × world_size`."""

    global_batch: int
    batch_size: int
    accumulate: int


def plan_batches(opts: Options, world_size: int) -> Batches:
    """Derive what is missing.

    Raises:
        UsageError: the sizes contradict each other or leave a remainder; the message has the
            nearest values that fit.
    """
    total, size, times = opts.global_batch, opts.batch_size, opts.accumulate
    if total is None and opts.elastic:
        raise UsageError(
            "--elastic without --global-batch",
            "a global batch that does not follow the number of ranks",
            "--global-batch N    (one that all numbers of ranks that may be left divide)",
        )
    if total is None:
        size = size or _DEFAULT_BATCH_SIZE
        times = times or 1
        return Batches(size * times * world_size, size, times)
    if size is None:
        unit, unit_name = world_size * (times or 1), f"{world_size} ranks"
        if times:
            unit_name += f" × {times} accumulated"
    elif times is None:
        unit, unit_name = world_size * size, f"{world_size} ranks × {size} (--batch-size)"
    else:
        unit = world_size * size * times
        if unit != total:
            raise UsageError(
                f"--global-batch {total}, but {world_size} ranks × --batch-size {size} × "
                f"--accumulate {times} = {unit}",
                "global batch = batch size × accumulate × ranks",
                f"--global-batch {unit}, or leave one of the three out",
            )
        return Batches(total, size, times)
    if total % unit:
        below, above = total // unit * unit, -(-total // unit) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UsageError(
            f"--global-batch {total} cannot be cut into equal parts for {unit_name}",
            f"a multiple of {unit}",
            f"--global-batch {nearest}",
        )
    parts = total // unit
    return Batches(total, parts, times or 1) if size is None else Batches(total, size, parts)
