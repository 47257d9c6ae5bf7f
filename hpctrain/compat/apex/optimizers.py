"""apex.optimizers, on torch's fused optimizers and on LAMB.

Each is a function that gives torch's own optimizer, with Apex's arguments and defaults, which also
loads the state of Apex's.
"""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hpctrain.errors import UsageError
from hpctrain.optim import LAMB

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]


def FusedAdam(  # noqa: N802, as Apex's class
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Optimizer:
    """torch.optim.AdamW, or Adam without `adam_w_mode`, fused.

    Raises:
        UsageError: what neither has.
    """
    _refuse("FusedAdam", "amsgrad", amsgrad, False, "torch.optim.AdamW(…, amsgrad=True)")
    _refuse("FusedAdam", "bias_correction", bias_correction, True, "leave bias_correction out")
    _refuse("FusedAdam", "set_grad_none", set_grad_none, True, _ZERO)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return _loads_apex(
        kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    )


def FusedSGD(  # noqa: N802
    params: ParamsT,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    materialize_master_grads: bool = True,
) -> Optimizer:
    """torch.optim.SGD, fused; master gradients are always there.

    Raises:
        UsageError: weight decay after the momentum.
    """
    del materialize_master_grads  # without them Apex saved memory; numbers are the same
    _refuse(
        "FusedSGD", "wd_after_momentum", wd_after_momentum, False, "leave wd_after_momentum out"
    )
    optimizer = torch.optim.SGD(
        params,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        fused=True,
    )
    return _loads_apex(optimizer)


def FusedLAMB(  # noqa: N802
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    amsgrad: bool = False,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    set_grad_none: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
) -> Optimizer:
    """hpctrain.optim.LAMB; gradients are clipped to a norm of 1 unless `max_grad_norm` is another.

    Raises:
        UsageError: what it does not have.
    """
    _refuse("FusedLAMB", "amsgrad", amsgrad, False, "leave amsgrad out")
    _refuse("FusedLAMB", "set_grad_none", set_grad_none, True, _ZERO)
    optimizer = LAMB(
        params,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=bias_correction,
        adam_w_mode=adam_w_mode,
        grad_averaging=grad_averaging,
        max_grad_norm=max_grad_norm,
        use_nvlamb=use_nvlamb,
    )
    return _loads_apex(optimizer)


_ZERO = "leave set_grad_none out, and optimizer.zero_grad(set_to_none=False)"


def _refuse(optimizer: str, name: str, value: Any, only: Any, fix: str) -> None:
    if value is not only:
        raise UsageError(f"{optimizer}(…, {name}={value})", f"{name}={only}", fix)


def _loads_apex(optimizer: Optimizer) -> Optimizer:
    optimizer.register_load_state_dict_pre_hook(_translate)
    return optimizer


def _translate(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Apex counted the steps of a group, and had fewer settings; torch counts each parameter's."""
    mine, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(mine) != len(saved):
        return None  # torch says so
    state = {number: dict(entry) for number, entry in state_dict["state"].items()}
    groups = []
    for own, group in zip(mine, saved, strict=True):
        step = group.get("step")
        groups.append({**own, **{name: group[name] for name in group if name != "step"}})
        for number in state.keys() & set(group["params"]) if step is not None else ():
            # LAMB keeps a number, which it can read without waiting for the device.
            whole = isinstance(optimizer, LAMB)
            state[number]["step"] = int(step) if whole else torch.tensor(float(step))
    return {"state": state, "param_groups": groups}
