"""apex.parallel, built on torch's DistributedDataParallel and SyncBatchNorm."""

from typing import Any

import torch
from torch import nn

from hpctrain.compat.apex.model_conversion import take_from_copies
from hpctrain.compat.apex.parallel.LARC import LARC
from hpctrain.compat.apex.properties import ANY, refuse
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["LARC", "DistributedDataParallel", "convert_syncbn_model"]

_IGNORED = (
    *("message_size", "shared_param", "allreduce_trigger_params", "num_allreduce_streams"),
    *("allreduce_communicators", "prof"),
)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with the arguments of Apex's, as keywords.

    As with Apex's, names in its `state_dict()` begin with `module.`, and each rank keeps its own
    running statistics of batch norm. torch has its own sizes of messages, streams and
    communicators, so arguments about these are ignored.

    Args:
        module: model on its device, after `amp.initialize`.
        delay_allreduce: True also supports models of which a step does not use all parameters.
        allreduce_always_fp32: not supported; True is logged if gradients are in half precision.
        gradient_predivide_factor: not supported; a value other than 1 is logged.
        more: other arguments of Apex's class, or of torch's.

    Raises:
        UsageError: `gradient_average` is False, or `retain_allreduce_buffers` is True.

    Source: apex/parallel/distributed.py.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        delay_allreduce: bool = False,
        allreduce_always_fp32: bool = False,
        gradient_predivide_factor: float = 1.0,
        **more: Any,
    ) -> None:
        supported: dict[str, Any] = {"gradient_average": True, "retain_allreduce_buffers": False}
        supported |= dict.fromkeys(_IGNORED, ANY)
        more = refuse(type(self).__name__, more, supported)
        in_half = any(p.dtype == torch.float16 for p in module.parameters())
        if allreduce_always_fp32 and in_half:
            _warn("allreduce_always_fp32=True", "gradients in half precision are summed in it")
        if gradient_predivide_factor != 1:
            _warn(
                f"gradient_predivide_factor={gradient_predivide_factor:g}",
                "gradients are divided by the number of ranks alone",
            )
        super().__init__(module, find_unused_parameters=delay_allreduce, **more)
        # Set as an attribute, as the argument has another name from torch 2.15 on.
        self.broadcast_buffers = False
        take_from_copies(module)


def _warn(argument: str, what: str) -> None:
    logger.warning(
        "DistributedDataParallel(…, %s): torch's class has no such argument, %s", argument, what
    )


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Return the model with batch norm over the batches of all ranks.

    Args:
        module: model, before it is wrapped.
        process_group: process group of the ranks; None for all ranks.
        channel_last: ignored; torch reads the memory format from the tensors.

    Raises:
        UsageError: there is no GPU, and torch's SyncBatchNorm does not support tensors on CPUs.
    """
    del channel_last
    if not torch.cuda.is_available():
        raise UsageError("HT408.no-gpu")
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-any-return, no-untyped-call]
