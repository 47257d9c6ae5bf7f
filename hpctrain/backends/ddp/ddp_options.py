"""The options of DistributedDataParallel: buckets and compression of the gradients."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpctrain.backends.settings import BackendSettings
from hpctrain.errors import UsageError

__all__ = ["arguments", "check_model", "compress", "refuse_options"]

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWERSGD_DEFAULTS = {"powersgd_rank": 1, "powersgd_start": 1000}
_BUCKET_MB = 25.0  # torch's default; its first bucket has 1 MB
_FIRST_START = 2  # before this step DistributedDataParallel rearranges its buckets


def refuse_options(settings: BackendSettings, transport: str) -> None:
    """Raise an error for options that this torch does not support.

    Args:
        settings: settings of the backend.
        transport: "nccl" or "gloo".

    Raises:
        UsageError: torch does not support an option, or would silently ignore it.
    """
    own = settings.own
    name = own["compression"]
    if own["static_graph"] and settings.accumulate > 1:
        raise UsageError("HT311.static-graph-with-accumulation", settings=settings)
    if name != "powersgd":
        for key, default in _POWERSGD_DEFAULTS.items():
            if own[key] != default:
                option = key.replace("_", "-")
                raise UsageError(
                    "HT311.powersgd-option", option=option, value=own[key], compression=name
                )
    if name == "bf16" and not dist.is_nccl_available():
        raise UsageError("HT316.torch-without-nccl")
    if name == "powersgd":
        _refuse_powersgd(settings, transport)


def _refuse_powersgd(settings: BackendSettings, transport: str) -> None:
    own = settings.own
    if own["powersgd_start"] < _FIRST_START:
        raise UsageError("HT311.powersgd-start-too-small", own=own)
    if settings.loss_scaled:
        raise UsageError("HT313.powersgd")
    if transport == "gloo" and own["bucket_mb"] != _BUCKET_MB:
        raise UsageError("HT311.powersgd-buckets-over-gloo", own=own)


def check_model(model: nn.Module, name: str, transport: str) -> None:
    """Check whether a compression supports the gradients of a model.

    Args:
        model: model with trained parameters.
        name: name of the compression.
        transport: "nccl" or "gloo".

    Raises:
        UsageError: the compression fails on the gradients, or loses precision for no gain.
    """
    if name == "none":
        return
    for where, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UsageError(
                "HT312.compressed-sparse-gradients", compression=name, module=where or "the model"
            )
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    half = _HALF.get(name)
    if half and not (torch.float32 in kinds and kinds <= {torch.float32, half}):
        raise UsageError("HT312.compression-of-types", compression=name, dtypes=_names(kinds))
    if name == "powersgd" and transport == "gloo" and len(kinds) > 1:
        raise UsageError("HT312.powersgd-of-several-types", dtypes=_names(kinds))


def _names(kinds: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def arguments(model: nn.Module, own: Mapping[str, Any], transport: str) -> dict[str, Any]:
    """Return the arguments for DistributedDataParallel.

    Args:
        model: model to wrap.
        own: options of the backend.
        transport: "nccl" or "gloo".
    """
    size: float | None = own["bucket_mb"] if own["bucket_mb"] != _BUCKET_MB else None
    if own["compression"] == "powersgd" and transport == "gloo":
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20 + 1
    return {
        "bucket_cap_mb": size,
        "static_graph": own["static_graph"],
        "find_unused_parameters": own["find_unused_parameters"],
        "gradient_as_bucket_view": own["gradient_as_bucket_view"],
    }


def compress(wrapped: DistributedDataParallel, own: Mapping[str, Any]) -> None:
    """Let a wrapped model compress the gradients that it sends.

    Args:
        wrapped: wrapped model, before its first backward pass.
        own: options of the backend.
    """
    name = own["compression"]
    if name in _HALF:
        hook = getattr(default_hooks, f"{name}_compress_hook")
        DistributedDataParallel.register_comm_hook(wrapped, None, hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=own["powersgd_rank"],
            start_powerSGD_iter=own["powersgd_start"],
        )
        DistributedDataParallel.register_comm_hook(wrapped, state, _power_sgd)


def _power_sgd(
    state: powerSGD_hook.PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Run torch's PowerSGD hook without changing the random numbers of the training.

    torch's hook draws the first matrices after `torch.manual_seed` with one seed for all ranks, and
    restores the state of the CPU only: on GPUs all ranks would drop the same units from then on.
    Source: Vogels et al., "PowerSGD", 2019 (arXiv 1905.13727), and powerSGD_hook.py of torch 2.15.
    """
    device = bucket.buffer().device
    draws = state.iter >= state.start_powerSGD_iter and bucket.index() not in state.p_memory_dict
    with torch.random.fork_rng([device], enabled=draws and device.type == "cuda"):
        return powerSGD_hook.powerSGD_hook(state, bucket)
