"""apex.optimizers, built on torch's fused optimizers and on hpctrain's LAMB.

Each function has the arguments and defaults of Apex's class. The optimizer that it returns can also
load a state that Apex saved.
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
    """Return a fused torch.optim.AdamW, or a fused Adam if `adam_w_mode` is False.

    Raises:
        UsageError: `amsgrad` is not False, or `bias_correction` or `set_grad_none` is not True.
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
    """Return a fused torch.optim.SGD; `materialize_master_grads` is ignored.

    Raises:
        UsageError: `wd_after_momentum` is not False.
    """
    del materialize_master_grads  # False saved memory in Apex; the numbers are the same
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
    """Return an hpctrain.optim.LAMB, which clips gradients to the norm `max_grad_norm`.

    Raises:
        UsageError: `amsgrad` is not False, or `set_grad_none` is not True.
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
        raise UsageError("HT415", f"{optimizer}(…, {name}={value})", f"{name}={only}", fix)


def _loads_apex(optimizer: Optimizer) -> Optimizer:
    optimizer.register_load_state_dict_pre_hook(_translate)
    return optimizer


def _translate(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Convert a state of Apex, which counts steps by group and has fewer settings than torch."""
    own_groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(own_groups) != len(saved_groups):
        return None  # torch raises an error for it
    state = {number: dict(entry) for number, entry in state_dict["state"].items()}
    groups = []
    for own, group in zip(own_groups, saved_groups, strict=True):
        step = group.get("step")
        groups.append({**own, **{name: group[name] for name in group if name != "step"}})
        for number in state.keys() & set(group["params"]) if step is not None else ():
            # LAMB keeps a plain number, which it can read without waiting for the device.
            whole = isinstance(optimizer, LAMB)
            state[number]["step"] = int(step) if whole else torch.tensor(float(step))
    return {"state": state, "param_groups": groups}
