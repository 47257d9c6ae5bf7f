"""Types of the keywords of a Session, for editors and type checkers (PEP 692).

A test compares them with the tables, so that both have the same names and types.
"""

from os import PathLike
from typing import TypedDict

__all__ = ["DDPKeywords", "FSDPKeywords", "HorovodKeywords", "Keywords"]


class DDPKeywords(TypedDict, total=False):
    """Settings of DistributedDataParallel: `Session(ddp={…})`."""

    compression: str
    powersgd_rank: int
    powersgd_start: int
    bucket_mb: float
    static_graph: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool


class FSDPKeywords(TypedDict, total=False):
    """Settings of fully sharded training: `Session(fsdp={…})`."""

    blocks: str | None
    reshard: bool
    hybrid: bool
    offload: bool


class HorovodKeywords(TypedDict, total=False):
    """Settings of Horovod: `Session(horovod={…})`."""

    op: str
    compression: str
    gradient_predivide_factor: float
    groups: int | None
    sparse_as_dense: bool


class Keywords(TypedDict, total=False):
    """Options of a Session."""

    run_dir: str | PathLike[str] | None
    resume: bool | None
    resume_from: str | PathLike[str] | None
    restore: str
    elastic: bool
    device: str
    backend: str
    precision: str
    loss_scale: float | str | None
    keep_batchnorm_fp32: bool | None
    max_nonfinite: int
    check_replicas_every: int | None
    global_batch: int | None
    batch_size: int | None
    accumulate: int | None
    epochs: int | None
    max_steps: int | None
    seed: int
    seed_everything: bool
    handle_signals: bool
    report_errors: bool
    deterministic: bool
    same_data: bool
    workers: int | str
    clip_norm: float | None
    clip_value: float | None
    sync_batchnorm: bool
    activation_checkpointing: bool
    channels_last: bool | None
    compile: bool
    log_every: int
    checkpoint_every: int | None
    checkpoint_minutes: float | None
    keep_checkpoints: int
    checkpoint_frozen: bool
    keep_best: str | None
    track: str | None
    profile: str | None
    start_timeout: float
    timeout: float
    ddp: DDPKeywords | str | None
    fsdp: FSDPKeywords | str | None
    horovod: HorovodKeywords | str | None
