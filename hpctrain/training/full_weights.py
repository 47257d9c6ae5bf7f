"""All weights of a model, for the script: as a state_dict, or in a file."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.durable_files import sync
from hpctrain.checkpoint.export import SUFFIX, import_safetensors
from hpctrain.errors import UsageError
from hpctrain.process.pytree import tensors_in
from hpctrain.training.consensus import meet, on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.prepare import inner

__all__ = ["full_state", "save_weights", "watch_saving"]


def full_state(context: Context, model: nn.Module) -> dict[str, Any]:
    """Return the full state of a model on every rank; see `Session.state_dict`."""
    meet(context.backend, "session.state_dict()")
    copies: dict[int, Tensor] = {}
    return {
        name: copies.setdefault(id(source), value) if isinstance(value, Tensor) else value
        for name, source, value in _values(context, model, True)
    }


def save_weights(context: Context, path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the full state of a model to a file; see `Session.save_weights`."""
    meet(context.backend, "session.save_weights()")
    target, main = Path(path), context.world.rank == 0
    state: dict[str, Any] = {}
    first: dict[int, str] = {}  # of the names of one tensor
    others: dict[str, str] = {}
    for name, source, value in _values(context, model, main):
        if main and (stored := first.setdefault(id(source), name)) != name:
            others[name] = stored
        elif main:
            state[name] = value
    on_rank_zero(context.backend, lambda: _write(target, state, others))


def _values(context: Context, model: nn.Module, wanted: bool) -> Iterator[tuple[str, object, Any]]:
    """Yield the name, the source and a copy on the CPU of each value of a model's state.

    Called by all ranks, as each value is gathered from all of them; one at a time is in memory.

    Args:
        context: context of the training.
        model: any model; of its half-precision weights, their fp32 masters are used.
        wanted: whether this rank needs the copies; else they are None.
    """
    for name, value in inner(model).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            yield name, value, value
            continue
        source = context.precision.master(value) if isinstance(value, nn.Parameter) else value
        full = context.backend.whole(source.detach())
        yield name, source, full.to("cpu", copy=True) if wanted else None


def _write(target: Path, state: Mapping[str, Any], others: Mapping[str, str]) -> None:
    """Write a file completely or not at all.

    Args:
        target: file to write; an existing one is replaced.
        state: values by name.
        others: names of tensors that have another name in `state`.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        if target.suffix == SUFFIX:
            tensors = {
                n: value.contiguous() for n, value in state.items() if torch.is_tensor(value)
            }
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode & 0o777
            import_safetensors().save_file(tensors, str(temporary), {"format": "pt", **others})
            temporary.chmod(mode)
        else:
            torch.save(
                {**state, **{name: state[other] for name, other in others.items()}}, temporary
            )
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        sync(target.parent)
    except UsageError:
        raise
    except Exception as error:  # safetensors has its own error type
        raise UsageError("HT712.not-written", target=target, error=error) from None
    finally:
        temporary.unlink(missing_ok=True)


def watch_saving(undo: ExitStack) -> None:
    """Refuse `torch.save` of tensors of which this rank has a part alone, until `undo`.

    A file of them cannot be used, and torch writes it without a word.
    """
    from torch.distributed.tensor import DTensor  # fsdp has imported it; it takes long

    own: Callable[..., None] = torch.save

    @wraps(own)
    def save(obj: object, *arguments: Any, **keywords: Any) -> None:
        parts = sum(isinstance(tensor, DTensor) for tensor in tensors_in(obj))
        if parts:
            raise UsageError("HT319.parts-saved", parts=parts)
        own(obj, *arguments, **keywords)

    torch.save = save
    undo.callback(setattr, torch, "save", own)
