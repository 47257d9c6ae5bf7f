"""apex.parallel, built on torch's DistributedDataParallel and SyncBatchNorm."""

from typing import Any

import torch
from torch import nn

from hpctrain.compat.apex.model_conversion import take_from_copies
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["DistributedDataParallel", "convert_syncbn_model"]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with the arguments of Apex's.

    As with Apex's, names in its `state_dict()` begin with `module.`, and each rank keeps its own
    running statistics of batch norm.

    Args:
        module: model on its device, after `amp.initialize`.
        message_size: ignored; torch has its own bucket sizes.
        delay_allreduce: True also supports models of which a step does not use all parameters.
        shared_param: ignored; torch supports shared parameters.
        allreduce_trigger_params: ignored.
        retain_allreduce_buffers: not supported.
        allreduce_always_fp32: not supported; logs a warning if it would change numbers.
        num_allreduce_streams, allreduce_communicators: ignored.
        gradient_average: only True is supported.
        gradient_predivide_factor: not supported; logs a warning if it is not 1.
        prof: ignored.

    Raises:
        UsageError: `gradient_average` is False, or `retain_allreduce_buffers` is True.

    Source: apex/parallel/distributed.py.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        prof: bool = False,
    ) -> None:
        del message_size, shared_param, allreduce_trigger_params, num_allreduce_streams
        del allreduce_communicators, prof
        if not gradient_average:
            raise UsageError(
                "HT415",
                "DistributedDataParallel(…, gradient_average=False)",
                "gradients that are averaged over the ranks",
                "leave gradient_average out, and multiply the loss by the number of ranks",
            )
        if retain_allreduce_buffers:
            raise UsageError(
                "HT415",
                "DistributedDataParallel(…, retain_allreduce_buffers=True)",
                "gradients that are read from the parameters",
                "leave retain_allreduce_buffers out",
            )
        in_half = any(p.dtype == torch.float16 for p in module.parameters())
        if allreduce_always_fp32 and in_half:
            _warn("allreduce_always_fp32=True", "gradients in half precision are summed in it")
        if gradient_predivide_factor != 1:
            _warn(
                f"gradient_predivide_factor={gradient_predivide_factor:g}",
                "gradients are divided by the number of ranks alone",
            )
        super().__init__(module, find_unused_parameters=delay_allreduce)
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
        raise UsageError(
            "HT408",
            "convert_syncbn_model() on a machine where torch sees no GPU",
            "a GPU for each rank, as torch's SyncBatchNorm has",
            "a Session with --sync-batchnorm (it works on CPUs)",
            "leave convert_syncbn_model() out",
        )
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    converted: nn.Module = convert(module, process_group)
    return converted
