"""Settings of the backends: one option for each backend, `--ddp static-graph,bucket-mb=25`."""

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.arguments.kinds import Number, expected_instead, option
from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError

__all__ = ["COUNT", "GROUPS", "Group", "positive"]

COUNT = Number("a whole number from 1 on", "N", least=1)
positive = Number("a number above 0", above=0.0)

_SWITCH = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True, slots=True)
class DDP:
    """Settings of DistributedDataParallel."""

    compression: str = option(
        "none", "gradient compression", choices=("none", "fp16", "bf16", "powersgd")
    )
    powersgd_rank: int = option(1, "rank of PowerSGD's approximation", COUNT)
    powersgd_start: int = option(1000, "steps before PowerSGD starts", COUNT)
    bucket_mb: float = option(25.0, "MiB of gradients per message", positive)
    static_graph: bool = option(False, "declare that every step uses the same parameters")
    find_unused_parameters: bool = option(
        False,
        "search in every step for parameters that the loss does not use, such as skipped layers",
    )
    gradient_as_bucket_view: bool = option(
        True, "store gradients in the message buffers, without a copy"
    )


@dataclass(frozen=True, slots=True)
class FSDP:
    """Settings of fully sharded training."""

    blocks: str | None = option(
        None,
        "classes of the modules whose weights are gathered together, with + between them "
        "(default: what the model repeats in a list)",
        metavar="CLASS+CLASS",
    )
    reshard: bool = option(True, "free the weights of a block between forward and backward")
    hybrid: bool = option(False, "divide the weights within a host, and keep a copy per host")
    offload: bool = option(False, "keep weights and optimizer states in the host's memory")


@dataclass(frozen=True, slots=True)
class Horovod:
    """Settings of Horovod."""

    op: str = option(
        "average", "reduction of the gradients over the ranks", choices=("average", "sum", "adasum")
    )
    compression: str = option("none", "gradient compression", choices=("none", "fp16"))
    gradient_predivide_factor: float = option(
        1.0, "part of the average's divisor that is applied before the sum", positive
    )
    groups: int | None = option(None, "number of messages for all gradients", COUNT)
    sparse_as_dense: bool = option(False, "send sparse gradients as dense")


class _SettingError(ValueError):
    """A setting that a group does not have, or a value that it does not accept.

    Attributes:
        found, expected, near: what was found, what is expected, and the nearest correct text.
    """

    def __init__(self, found: str, expected: str, near: str = "") -> None:
        super().__init__(found, expected, near)
        self.found, self.expected, self.near = found, expected, near


class Group:
    """Option with the settings of one backend.

    The value of the option is a text, `static-graph,bucket-mb=25`: a switch is its name, or has
    `yes` or `no` after it. A keyword takes the same text, or a dict of Python values,
    `{"static_graph": True, "bucket_mb": 25}`.

    Args:
        name: name of the option.
        table: dataclass with a field for each setting.
    """

    def __init__(self, name: str, table: type[Any]) -> None:
        self.name, self.table = name, table
        self.fields = {field.name: field for field in dataclasses.fields(table)}

    def __call__(self, text: str) -> str:
        """Check and shorten a text of the command line."""
        try:
            return self._text(self._read(text))
        except _SettingError as wrong:
            hint = f"; did you mean {wrong.near}?" if wrong.near else ""
            message = f"{wrong.found}: expected {wrong.expected}{hint}"
            raise argparse.ArgumentTypeError(message) from None

    def text(self, given: str | Mapping[str, Any] | None) -> str | None:
        """Return the text of what a keyword has, without the settings that have their default.

        Raises:
            UsageError: a setting is unknown or has a wrong value.
        """
        try:
            return self._text(self._read(given)) or None
        except _SettingError as wrong:
            correction = f"--{self.name} {wrong.near}" if wrong.near else ""
            raise UsageError(
                "HT501.wrong-setting", group=self, setting=wrong, correction=correction
            ) from None

    def values(self, text: str | None) -> dict[str, Any]:
        """Return the values of all settings by name, for a text that `text` returned."""
        return {name: one.default for name, one in self.fields.items()} | self._read(text)

    @property
    def help(self) -> str:
        """List all settings with their values and defaults."""
        settings = ", ".join(map(_described, self.fields.values()))
        return f"settings of --backend {self.name}, separated by commas: {settings}"

    def _read(self, given: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the settings that are given, by name."""
        values: dict[str, Any] = {}
        for name, value in self._pairs(given):
            setting = name.strip().replace("_", "-")
            field = self.fields.get(setting.replace("-", "_"))
            if field is None:
                known = [_dashed(one) for one in self.fields]
                raise _SettingError(name, f"one of {', '.join(known)}", nearest(setting, known))
            if field.name in values:
                raise _SettingError(f"{setting} twice", "each setting once")
            values[field.name] = _checked(field, value, typed=isinstance(given, str))
        return values

    def _pairs(self, given: Any) -> list[tuple[str, Any]]:
        if given is None:
            return []
        if isinstance(given, str):
            parts = (part.partition("=") for part in given.split(",") if part.strip())
            return [(name, value if equals else None) for name, equals, value in parts]
        if isinstance(given, Mapping):
            return [(str(name), value) for name, value in given.items()]
        raise _SettingError(repr(given), "a text or a dict of settings")

    def _text(self, values: Mapping[str, Any]) -> str:
        """Return settings as a text, in the order of the table."""
        changed = {
            name: values[name]
            for name, field in self.fields.items()
            if name in values and values[name] != field.default
        }
        return ",".join(_written(_dashed(name), value) for name, value in changed.items())


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _written(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{name}={'no' if value is False else value}"


def _described(field: Any) -> str:
    """Return a setting with its values and its default, as in the help."""
    name, spec = _dashed(field.name), field.metadata
    if "action" in spec:
        return f"{name}=no" if field.default else name
    values = "|".join(spec["choices"]) if "choices" in spec else spec["metavar"]
    default = (
        "" if field.default is None else f" ({_written(name, field.default)[len(name) + 1 :]})"
    )
    return f"{name}={values}{default}"


def _checked(field: Any, value: Any, typed: bool) -> Any:
    """Return the value of a setting, converted if it was typed, as a text or None for no text."""
    name, spec = _dashed(field.name), field.metadata
    is_switch, choices = "action" in spec, spec.get("choices")
    if typed and value is None and not is_switch:
        raise _SettingError(name, f"a value, as in {_described(field)}")
    found = value
    if typed and is_switch:
        value = True if value is None else _SWITCH.get(value.strip().lower(), value)
    elif typed and isinstance(spec["type"], Number):
        with contextlib.suppress(argparse.ArgumentTypeError):
            value = spec["type"](value.strip())
    expected = expected_instead(field, value)
    if isinstance(value, str) and {",", "="} & set(value):
        expected = "names with + between them"
    if not expected:
        return value
    if is_switch:
        expected = f"{name} or {name}=no" if typed else "True or False"
    near = nearest(str(found), choices) if choices else ""
    raise _SettingError(f"{name}={found}", expected, f"{name}={near}" if near else "")


GROUPS = {
    name: Group(name, table) for name, table in (("ddp", DDP), ("fsdp", FSDP), ("horovod", Horovod))
}
