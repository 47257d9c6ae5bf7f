"""apex.optimizers, built on torch's fused optimizers and on a LAMB.

Each function has the arguments and defaults of Apex's class; those behind the learning rate are
keywords. The optimizer that it returns can also load a state that Apex saved.
"""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hpctrain.compat.apex.lamb import LAMB
from hpctrain.compat.apex.properties import ANY, refuse

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]


def FusedAdam(  # noqa: N802, as Apex's class
    params: ParamsT,
    lr: float = 1e-3,
    *,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    **settings: Any,
) -> Optimizer:
    """Return a fused torch.optim.AdamW, or a fused Adam if `adam_w_mode` is False.

    Raises:
        UsageError: `amsgrad` is not False, or `bias_correction` or `set_grad_none` is not True.
    """
    only = {"amsgrad": False, "bias_correction": True, "set_grad_none": True}
    settings = refuse("FusedAdam", settings, only)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return _loads_apex(kind(params, lr, weight_decay=weight_decay, fused=True, **settings))


def FusedSGD(  # noqa: N802
    params: ParamsT,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    **settings: Any,
) -> Optimizer:
    """Return a fused torch.optim.SGD.

    Raises:
        UsageError: `wd_after_momentum` is not False.
    """
    # False for materialize_master_grads saved memory in Apex; the numbers are the same.
    only = {"wd_after_momentum": False, "materialize_master_grads": ANY}
    settings = refuse("FusedSGD", settings, only)
    sgd = torch.optim.SGD(params, lr, momentum, dampening, weight_decay, fused=True, **settings)
    return _loads_apex(sgd)


def FusedLAMB(  # noqa: N802
    params: ParamsT,
    lr: float = 1e-3,
    *,
    max_grad_norm: float = 1.0,
    **settings: Any,
) -> Optimizer:
    """Return a LAMB, which clips gradients to the norm `max_grad_norm`.

    Raises:
        UsageError: `amsgrad` is not False, or `set_grad_none` is not True.
    """
    settings = refuse("FusedLAMB", settings, {"amsgrad": False, "set_grad_none": True})
    return _loads_apex(LAMB(params, lr=lr, max_grad_norm=max_grad_norm, **settings))


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
