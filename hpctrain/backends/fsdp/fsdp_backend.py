"""Models whose weights, gradients and optimizer states are divided among the ranks: FSDP2.

Source: `torch.distributed.fsdp.fully_shard` in torch's documentation; Rajbhandari et al., "ZeRO",
2020 (arXiv 1910.02054).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hpctrain.backends.blocks import find_blocks
from hpctrain.backends.distributed import ProcessGroup
from hpctrain.backends.extent import Extent
from hpctrain.backends.fsdp.call_order import CallOrder
from hpctrain.backends.meta_models import allocate, on_meta
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process.heartbeat import Heartbeat
from hpctrain.process.logging import logger
from hpctrain.process.pytree import tensors_in
from hpctrain.rendezvous import Rendezvous

__all__ = ["FSDP"]

# Their updates use calls that DTensor, the type of divided weights, has not (torch 2.14.1); the
# state of LBFGS is one vector of all parameters.
_NOT_FOR_DIVIDED = ("Adafactor", "LBFGS", "Rprop")
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp8")


class FSDP(ProcessGroup):
    """The backend whose ranks each hold a part of every weight, as torch's FSDP2 divides it.

    A block of the model is gathered before its forward and backward passes, and freed after them.
    Gradients are averaged as they are divided again.
    """

    name = "fsdp"
    sharded = True

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        self._own, self._precision = settings.own, settings.precision
        world = rendezvous.world
        shape: tuple[int, ...] = (world.world_size,)
        dimensions: tuple[str, ...] = ("shard",)
        if settings.own["hybrid"]:
            counts = Counter(rendezvous.roster.host_names)
            if len(set(counts.values())) > 1:
                listed = ", ".join(f"{n} on {host}" for host, n in counts.items())
                raise UsageError("HT319.hybrid-on-unequal-nodes", counts=listed)
            shape = (len(counts), world.world_size // len(counts))
            dimensions = ("replicate", "shard")
        # After the check: an error must leave no process group open.
        super().__init__(rendezvous, device, settings)
        self._divided: list[FSDPModule] = []
        self._order = CallOrder(self.all_gather_text)
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=dimensions)

    @classmethod
    def check(cls, world: World, device: torch.device, settings: BackendSettings) -> None:
        """Check that the precision has no loss scale and no master weights.

        Raises:
            UsageError: the backend does not support the precision or an option.
        """
        if settings.precision not in _PRECISIONS:
            precisions = ", ".join(_PRECISIONS)
            raise UsageError("HT319.precision", settings=settings, precisions=precisions)
        if settings.own["offload"] and device.type == "cpu":
            raise UsageError("HT319.offload-on-cpu")

    def _libraries(self) -> str:
        """Return NCCL alone, or gloo as well for weights that wait in the memory of the host."""
        return "cpu:gloo,cuda:nccl" if self._own["offload"] else super()._libraries()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Divide the model in place; all ranks begin with the weights of rank 0.

        Raises:
            UsageError: the model has no block of a class in `--fsdp blocks`, or sparse gradients.
        """
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) and isinstance(
                module, (nn.Embedding, nn.EmbeddingBag)
            ):
                raise UsageError("HT312.sharded-sparse-gradients", module=name or "the model")
        self._share([*model.parameters(), *model.buffers()])
        empty = on_meta(model)
        # The model as a whole is one, too.
        blocks = [one for one in find_blocks(model, self._own["blocks"]) if one is not model]
        before = dict(model.named_parameters(remove_duplicate=False))
        half = torch.bfloat16 if self._precision in ("bf16", "fp8") else None
        arguments: dict[str, Any] = {
            "mesh": self._mesh,
            "offload_policy": CPUOffloadPolicy() if self._own["offload"] else OffloadPolicy(),
        }
        if half is not None:
            # The running statistics of batch norm are in fp32, and it needs weights like them.
            whole = MixedPrecisionPolicy(cast_forward_inputs=False)
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    fully_shard(module, mp_policy=whole, **arguments)
        arguments["mp_policy"] = MixedPrecisionPolicy(half, torch.float32 if half else None)
        for block in reversed(blocks):  # inner blocks first
            if not isinstance(block, FSDPModule):
                fully_shard(block, reshard_after_forward=self._own["reshard"], **arguments)
        fully_shard(model, reshard_after_forward=False, **arguments)
        for name, module in model.named_modules(prefix=type(model).__name__.removeprefix("FSDP")):
            if isinstance(module, FSDPModule):
                self._divided.append(module)
                self._order.watch(module, name)  # type: ignore[arg-type]
                module.register_forward_pre_hook(_refuse_other_weights, prepend=True)  # type: ignore[attr-defined]
                module.register_forward_hook(_end_of_pass)  # type: ignore[attr-defined]
                module.register_forward_hook(self._refuse_changes, prepend=True)  # type: ignore[attr-defined]
        if empty:
            allocate(model, "cpu" if self._own["offload"] else self.device)
        weights = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def refuse_first(model: nn.Module, inputs: Any) -> None:
            # In the first call, torch takes whatever is there for the weights.
            first.remove()
            for module, name, parameter in weights:
                _refuse_other(name, getattr(module, name), (parameter,))

        first = model.register_forward_pre_hook(refuse_first, prepend=True)
        self._order.watch_gradients(list(model.named_parameters()))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # An optimizer may have been created before, and still has the parameter as it was.
            before[name].divided = parameter  # type: ignore[attr-defined]
        counts = Counter(type(block).__name__.removeprefix("FSDP") for block in blocks)
        logger.info(
            "fsdp gathers the weights of %s at a time%s",
            " or ".join(f"one of {count} {name}" for name, count in counts.items())
            or "the whole model",
            ""
            if blocks
            else ", as no container has several modules of one class (--fsdp blocks=CLASS)",
        )
        return model

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _refuse_changes(self, module: FSDPModule, inputs: Any, output: Any) -> None:
        """Refuse, in the first passes, parameters that a forward pass changes in place.

        The change is in the gathered weights, which are freed, and not in the part of a rank.
        """
        if not self._order.first_passes:
            return
        for parameter in _parameters_of(module):
            gathered, own = parameter._unsharded_param.detach(), parameter.sharded_param
            if type(gathered) is Tensor and own.placements[-1] == Shard(0):
                extent, local = self.extent(own), own.to_local().detach().reshape(-1)
                part = gathered.reshape(-1)[extent.start : extent.stop]
                if not torch.equal(part.nan_to_num(), local.to(part).nan_to_num()):
                    name = parameter._module_info.param_name
                    raise UsageError("HT319.changed-in-forward", name=name)

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of rank 0 to all ranks, one at a time over the device."""
        for tensor in tensors:
            if not tensor.is_meta:
                staged = tensor.detach().to(self.device)
                self.broadcast([staged])
                tensor.detach().copy_(staged)

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer update this rank's parts of its parameters.

        Raises:
            UsageError: the optimizer has a state of whole parameters, needs whole weights, or
                makes calls that torch does not support for divided ones.
        """
        if getattr(optimizer, "needs_whole_weights", False):
            raise UsageError("HT319.optimizer-of-full-weights", optimizer=type(optimizer).__name__)
        if isinstance(optimizer, tuple(getattr(torch.optim, name) for name in _NOT_FOR_DIVIDED)):
            raise UsageError("HT319.optimizer-of-plain-weights", optimizer=type(optimizer).__name__)
        groups = optimizer.param_groups
        if optimizer.state and any(hasattr(p, "divided") for one in groups for p in one["params"]):
            raise UsageError("HT319.optimizer-with-state", optimizer=type(optimizer).__name__)
        for group in groups:
            group["params"] = [getattr(p, "divided", p) for p in group["params"]]
        # Weights that a pass without a backward pass has gathered would be old after the update.
        optimizer.register_step_pre_hook(lambda *_: self._reshard())

    def _reshard(self) -> None:
        for module in self._divided:
            module.reshard()

    def report_to(self, heartbeat: Heartbeat) -> None:
        """Report the waits of the first passes."""
        self._order.heartbeat = heartbeat

    @property
    def call_order(self) -> int:
        """Hash of the calls of blocks, and of which gradients there were."""
        return self._order.number

    def attach(self, loss: Tensor) -> Tensor:
        """Compare in the first passes that all ranks have called the same blocks."""
        if self._order.first_passes:
            self._order.before_backward()
        return loss

    def sync_gradients(self) -> None:
        """Compare in the first passes that all ranks have gradients of the same parameters."""
        self._order.after_backward()

    def synchronize(self, model: nn.Module, wanted: bool) -> None:
        """Let the next backward pass average the gradients, or add them up on each rank."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(wanted)

    def forget(self) -> None:
        """Discard the gradients of full weights, which only the last micro-batch divides.

        Optimizers do not have them, and torch has no public call for this. Source:
        `FSDPParamGroup.post_backward` in torch/distributed/fsdp/_fully_shard, torch 2.14.1.
        """
        for module in self._divided:
            for parameter in _parameters_of(module):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # gathered at least once
                    parameter._unsharded_param.grad = None

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather the parts of a tensor; called by all ranks."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def held(self, tensor: Tensor) -> tuple[Tensor, Extent]:
        """Return this rank's rows of a tensor; all of one that is divided otherwise."""
        if not isinstance(tensor, DTensor):
            return super().held(tensor)
        if tensor.placements[-1] != Shard(0):
            return super().held(tensor.full_tensor())
        return tensor.to_local().contiguous(), self.extent(tensor)

    def extent(self, tensor: Tensor) -> Extent:
        """Return the rows of a tensor that this rank holds."""
        if not isinstance(tensor, DTensor):
            return super().extent(tensor)
        # As torch.chunk divides: all parts but the last ones have the same number of rows.
        parts = self._mesh.size(self._mesh.ndim - 1)
        number = self.rank % parts
        rows = -(-tensor.shape[0] // parts)
        a_row = math.prod(tensor.shape[1:])
        start, stop = (min(n * rows, tensor.shape[0]) * a_row for n in (number, number + 1))
        ranks = range(number, self.world_size, parts)
        return Extent(tuple(tensor.shape), start, stop, ranks)

    def from_part(self, values: Tensor, like: Tensor) -> Tensor:
        """Return a tensor with this rank's rows."""
        if not isinstance(like, DTensor):
            return super().from_part(values, like)
        local = like.to_local()
        own = values.view(local.shape).to(local.device)
        return DTensor.from_local(
            own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )


def _parameters_of(module: FSDPModule) -> list[Any]:
    """Return what torch keeps of each parameter of a block: `FSDPParam` in its _fully_shard."""
    state: Any = module._get_fsdp_state()
    # Older releases of torch have one group of parameters for each module.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [one for group in groups if group for one in group.fsdp_params]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_other_weights(module: FSDPModule, inputs: Any) -> None:
    """Refuse weights that took the place of those of a block, as `functional_call` passes them.

    torch would gather its own weights in their place, and keep the others after the call. Inside a
    transform of torch.func it can gather none; torch has no public call that tells.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UsageError("HT319.transform")
    for parameter in _parameters_of(module):
        place = parameter._module_info
        known = (parameter.sharded_param, getattr(parameter, "_unsharded_param", None))
        _refuse_other(place.param_name, getattr(place.module, place.param_name), known)


def _refuse_other(name: str, there: Any, known: Sequence[Any]) -> None:
    if not any(there is one for one in known):
        raise UsageError("HT319.other-weights", name=name)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_of_pass(module: FSDPModule, inputs: Any, output: Any) -> None:
    """Refuse a backward pass through a block whose own graph is kept for another one.

    torch frees the weights of a block after its backward pass. The second pass would read memory
    without a value, which ends in an error of torch, or in a segmentation fault.

    Without gradients, free the weights here: an update of them by hand would change the gathered
    ones, and be lost.
    """
    if not torch.is_grad_enabled():
        module.reshard()
        return
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]


def _refuse_graph(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise UsageError("HT319.create-graph")
