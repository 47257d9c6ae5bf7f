"""Initial weights of a model, from a file or folder of hpctrain or another program.

Source for the formats: `torch.save(model.state_dict())`; the reference scripts of torchvision store
it under "model", those of timm under "state_dict", Lightning under "state_dict" with the name of an
attribute before each name; torch's DistributedDataParallel adds `module.`, `torch.compile`
`_orig_mod.`; `weight_files` reads the files.
"""

import fnmatch
import glob
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.weight_files import Source, Weight, read_weights, unreadable
from hpctrain.cluster.texts import listed
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["covering", "fill_weights"]

_MAX_NAMED = 3
# Keys under which well-known training scripts save the weights.
_KEYS = ("model", "state_dict", "model_state_dict", "module")


def fill_weights(
    model: nn.Module,
    source: Source,
    *,
    key: str | None = None,
    prefix: str = "",
    skip: Sequence[str] = (),
    read: Callable[[Weight, Tensor], Tensor] = lambda weight, _: weight.read(...),
) -> dict[str, Tensor]:
    """Load weights and buffers into a model; all of them or none.

    A name that the file lacks is filled if it shares its memory with one that the file has.

    Args:
        model: model to fill.
        source: file or folder, or weights by name.
        key: key of the weights in the file (default: the weights themselves, or one of the keys
            `model`, `state_dict`, `model_state_dict` and `module`).
        prefix: start of the names in the file that belong to the model, and that the model's names
            lack (default: what all names in the file start with).
        skip: patterns of names that keep their values in the model, in the syntax of fnmatch.
        read: function of a weight in the file and of the model's tensor, which returns the tensor
            to load, for models that are sharded over the ranks.

    Returns:
        The loaded values by name, as the file has them.

    Raises:
        UsageError: the file cannot be read, its names or shapes differ from the model's, or a
            pattern matches no name.
    """
    label = "the mapping" if isinstance(source, Mapping) else str(source)
    own = {name: value for name, value in model.state_dict().items() if _is_data(value)}
    kind = type(model).__name__.removeprefix("FSDP")
    found, place = _select(read_weights(source), own.keys(), label, key, prefix, kind)
    weights = {name: value for name, value in found.items() if _is_data(value)}
    skipped = _skipped({*own, *weights}, [skip] if isinstance(skip, str) else skip, label)
    _check(model, own, weights, skipped, label)
    try:
        loaded = {
            name: read(value, own[name]) if name in own and _is_data(value) else value
            for name, value in found.items()
            if name not in skipped
        }
        model.load_state_dict(loaded, strict=False)
    except Exception as error:  # of safetensors, whose errors have no common class
        raise unreadable(label, source, error) from None
    kept = sorted(skipped & own.keys())
    logger.info(
        "loaded the weights of %s%s%s",
        label,
        place,
        f", except {listed(kept)}" if kept else "",
    )
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def _skipped(names: Collection[str], patterns: Sequence[str], label: str) -> set[str]:
    """Return the names that match a pattern.

    Raises:
        UsageError: a pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            name = next(iter(names), "fc.weight")
            raise UsageError("HT714.unmatched-skip", pattern=pattern, label=label, name=name)
    return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}


def _check(
    model: nn.Module,
    own: Mapping[str, Tensor],
    weights: Mapping[str, Weight],
    skipped: Collection[str],
    label: str,
) -> None:
    """Check that a model's names and shapes are those of the file.

    Raises:
        UsageError: a name that is not skipped differs.
    """
    wrong = _differences(model, own, weights)
    left = {name: text for name, text in wrong.items() if name not in skipped}
    if left:
        names = {*own, *weights}
        texts, more = list(left.values())[:_MAX_NAMED], len(left) - _MAX_NAMED
        differences = "; ".join(texts + [f"and {more} more"] * (more > 0))
        patterns = sorted({*skipped, *covering(left.keys(), names)})
        key = "HT714.most-differ" if 2 * len(left) > len(names) else "HT714.some-differ"
        raise UsageError(key, label=label, differences=differences, patterns=patterns)


def _differences(
    model: nn.Module, own: Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> dict[str, str]:
    """Return what is wrong with a file for a model, by name.

    Args:
        model: model to fill.
        own: weights and buffers of the model.
        weights: those in the file.
    """
    # The memory of lazy parameters does not exist yet.
    there = {name: value for name, value in own.items() if not is_lazy(value)}
    place = _places(model, own)
    filled = {place[name] for name in there if name in weights}
    missing = [name for name in own if name not in weights]
    return {
        **{n: f"has no {n}" for n in missing if n not in there or place[n] not in filled},
        **{n: f"has {n}, which the model does not have" for n in weights if n not in own},
        **{
            n: f"has {n} of shape {tuple(weights[n].shape)}, the model's is {tuple(value.shape)}"
            for n, value in there.items()
            if n in weights and weights[n].shape != value.shape
        },
    }


def _places(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the memory of each tensor of a model; equal for two names of one weight."""
    known: dict[str, int] = {
        name: id(tensor)
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    # A model may give its state other names.
    return {
        name: known[name] if name in known else (value.data_ptr(), value.shape)
        for name, value in own.items()
    }


def _select(
    content: Any, own: Collection[str], label: str, key: str | None, prefix: str, kind: str
) -> tuple[dict[str, Any], str]:
    """Return the state of a model by the model's names, and its place in the file in words.

    Args:
        content: content of the file.
        own: names of the model's weights and buffers.
        label: name of the file.
        key, prefix: as for `fill_weights`.
        kind: class of the model.

    Raises:
        UsageError: the file has no such names, or several sets of them.
    """
    states = {None: content, **content} if isinstance(content, Mapping) else {}
    if key is None and not _prefixes(content, own):
        fitting = [name for name in _KEYS if _prefixes(states.get(name), own)]
        key = fitting[0] if len(fitting) == 1 else None
    state = states.get(key)
    if not prefix:
        prefix = _common(state, _prefixes(state, own))
    found = _below(prefix, state) if isinstance(state, Mapping) else {}
    if not any(name in found for name in own):
        raise _without_weights(content, states, own, label, kind)
    where = [f"{key!r}"] * (key is not None) + [f"with the prefix {prefix!r}"] * bool(prefix)
    return found, f" ({' '.join(where)})" if where else ""


def _prefixes(state: Any, own: Collection[str]) -> list[str]:
    """Return the prefixes before most of a model's names in a state; none if it has no such name.

    The only one is "" if the names are the model's.
    """
    counts: Counter[str] = Counter()
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if _is_data(value):
            parts = str(name).split(".")
            for depth in range(len(parts)):
                if ".".join(parts[depth:]) in own:
                    counts["".join(f"{part}." for part in parts[:depth])] += 1
    if "" in counts:
        return [""]
    return [prefix for prefix, count in counts.items() if count == max(counts.values())]


def _common(state: Any, prefixes: Sequence[str]) -> str:
    """Return the prefix if there is one, and all weights of a state have it; else ""."""
    if len(prefixes) != 1:
        return ""
    names = [str(name) for name, value in state.items() if _is_data(value)]
    return prefixes[0] if all(name.startswith(prefixes[0]) for name in names) else ""


def _without_weights(
    content: Any, states: Mapping[Any, Any], own: Collection[str], label: str, kind: str
) -> UsageError:
    """Return the error for a file without the model's names, with the arguments that find them."""
    names = listed([*own])
    if not isinstance(content, Mapping):
        content = type(content).__name__
        return UsageError("HT714.no-names", label=label, content=content, names=names, model=kind)
    places = [
        ", ".join(
            [*([f"key={key!r}"] * (key is not None)), *([f"prefix={prefix!r}"] * bool(prefix))]
        )
        for key, state in states.items()
        for prefix in _prefixes(state, own)
    ]
    keys = listed([*map(str, content)]) or "(none)"
    fixes = [f"session.load_weights(model, …, {place})" for place in places[:_MAX_NAMED]]
    fixes = fixes or ["use the weights of such a model"]
    return UsageError(
        "HT714.other-names", label=label, keys=keys, names=names, model=kind, fixes=fixes
    )


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name).removeprefix(prefix): value
        for name, value in state.items()
        if str(name).startswith(prefix)
    }


def _is_data(value: Any) -> bool:
    return isinstance(value, (Tensor, Weight))


def covering(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """Return as few patterns for fnmatch as fit all chosen names and none of the others.

    A pattern is the name of the outermost module whose names are all chosen, such as `layer1.*`,
    or a single name.

    Args:
        chosen: names to cover.
        names: all names, with the chosen ones; their parts are separated by dots.
    """
    outside = {prefix for name in names if name not in chosen for prefix in _modules_of(name)}
    found = {
        next(
            (f"{glob.escape(p)}*" for p in _modules_of(name) if p not in outside), glob.escape(name)
        )
        for name in chosen
    }
    return sorted(found)


def _modules_of(name: str) -> list[str]:
    """Return the names of the modules around a name, the outermost first, each with its dot."""
    parts = name.split(".")
    return [".".join(parts[:length]) + "." for length in range(1, len(parts))]
