"""The consistency check at start: the entry of each rank, and the values that must be equal."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import torch

from hpctrain._version import __version__
from hpctrain.cluster import env_vars
from hpctrain.cluster.texts import printable, ranks_text
from hpctrain.errors import ContradictionError
from hpctrain.process.logging import warn

__all__ = ["Difference", "check", "differences", "entry"]

# Arguments that a launcher sets differently for each rank.
_OWN_ARGUMENTS = ("--local_rank", "--local-rank")
_MOST_ARGUMENTS = 200
_MOST_FILES = 200
# An option and perhaps its value (`--name`, `--name=value`, `-n`, `-nvalue`). Other arguments,
# such as a negative number, match without a name.
_OPTION = re.compile(r"(?:(--[A-Za-z][\w-]*|-[A-Za-z])=?((?<=.)(?s:.+))?\Z)?")
# With it NCCL accepts several ranks on one GPU, from 2.30 on. Source: NCCL's message without it.
_MAY_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHOWN_VALUES = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between ranks.

    Attributes:
        subject: name of what differs, such as "torch".
        error: error that lists which ranks have which value.
        wrong: whether the ranks cannot train together, or would train something other than
            intended; if not, it is a warning.
    """

    subject: str
    error: ContradictionError
    wrong: bool = False


def entry(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data about this rank for the rendezvous, as JSON values.

    Args:
        device: device used by this rank.
        settings: options that decide the results of the training, by flag.

    Returns:
        `gpu` (its UUID, else PCI address; None for a CPU), `gpu_name`, `versions`, `settings`,
        `command` (its values are hashed, as they may be passwords), `code` (a hash by file: the
        script and the modules in its folder that are imported so far), `network` (settings of NCCL,
        gloo and similar).
    """
    cuda = device.type == "cuda"
    nccl = torch.cuda.nccl.version() if cuda else ()  # type: ignore[no-untyped-call]
    return {
        "gpu": _gpu(device) if cuda else None,
        "gpu_name": torch.cuda.get_device_name(device) if cuda else None,
        "versions": {
            "system": platform.system(),
            "hpctrain": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda or torch.version.hip,
            "nccl": ".".join(map(str, nccl)) or None,
            "horovod": _version("horovod") if settings.get("--backend") == "horovod" else None,
        },
        "settings": dict(settings),
        "command": _command(sys.argv),
        "code": _code(),
        "network": env_vars.of_the_network(os.environ),
    }


def check(entries: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Raise an error for a wrong difference, and log warnings for the others. Called on rank 0.

    Args:
        entries: result of `entry` on each rank, by rank.
        hosts: host name of each rank, by rank.

    Raises:
        ContradictionError: the first wrong difference, with its ranks.
    """
    found = differences(entries, hosts)
    for difference in found:
        if difference.wrong:
            raise difference.error
    for difference in found:
        warn(difference.error)


def differences(entries: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Sequence[Difference]:
    """Return the differences between the ranks, the wrong ones first.

    Args:
        entries: result of `entry` on each rank, by rank.
        hosts: host name of each rank, by rank.
    """
    ranks = _Ranks(entries, hosts)
    found = [*_shared_gpus(ranks), *_other_values(ranks), *_other_commands(ranks)]
    return sorted(found, key=lambda difference: not difference.wrong)


class _Ranks:
    """The entries of all ranks, with methods to group and format ranks.

    The rendezvous has made one object of the equal objects of all ranks. So each different object
    is looked at once, not once for each rank that has it.
    """

    def __init__(self, entries: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
        self.entries, self.hosts = entries, hosts
        self._grouped: dict[str, list[tuple[Any, list[int]]]] = {}

    def grouped(self, name: str) -> list[tuple[Any, list[int]]]:
        """Return the different objects under a name of the entries, with their ranks."""
        if name not in self._grouped:
            by_identity: dict[int, tuple[Any, list[int]]] = {}
            for rank, entry in enumerate(self.entries):
                value = entry[name]
                by_identity.setdefault(id(value), (value, []))[1].append(rank)
            self._grouped[name] = list(by_identity.values())
        return self._grouped[name]

    def keys(self, name: str) -> dict[str, None]:
        """Return all keys of the objects under a name of the entries."""
        return dict.fromkeys(key for value, _ in self.grouped(name) for key in value)

    def by_value(
        self, name: str, of: Callable[[Any], Any] = lambda value: value
    ) -> dict[Any, list[int]]:
        """Return the ranks that have each value, the value of rank 0 first.

        Args:
            name: name in the entries.
            of: function of what the entries have under that name.
        """
        groups: dict[Any, list[int]] = {}
        for value, ranks in self.grouped(name):
            groups.setdefault(of(value), []).extend(ranks)
        return groups

    def compare(
        self,
        name: str,
        of: Callable[[Any], Any],
        subject: str,
        label: str,
        key: str,
        wrong: bool = False,
    ) -> Iterator[Difference]:
        """Yield the difference if the ranks have different values.

        Args:
            name, of: as in `by_value`.
            subject, wrong: as in `Difference`.
            label: text before the values.
            key: key of the message, with the placeholders `values` and `name`.
        """
        groups = self.by_value(name, of)
        if name == "code":
            groups.pop(None, None)  # not imported there: a script may import by rank
        if len(groups) > 1:
            values = self.format_values(groups, label)
            yield Difference(subject, ContradictionError(key, values=values, name=subject), wrong)

    def format_values(self, groups: Mapping[Any, Sequence[int]], name: str) -> str:
        """Format groups: `torch 2.15.0 at ranks 0 and 1 on node1; 2.14.0 at rank 2 on node2`."""
        parts = [
            f"{'none' if value is None else printable(value)[:200]} at {self.format_ranks(ranks)}"
            for value, ranks in list(groups.items())[:_SHOWN_VALUES]
        ]
        return f"{name} {'; '.join(parts)}" + ("; …" if len(groups) > _SHOWN_VALUES else "")

    def format_ranks(self, ranks: Sequence[int]) -> str:
        """Format ranks and their hosts."""
        return ranks_text(ranks, self.hosts)


# With different versions of these, messages between ranks fail. Other versions of Python are only a
# warning.
_VERSIONS = ("hpctrain", "torch", "cuda", "nccl", "horovod", "python")


def _other_values(ranks: _Ranks) -> Iterator[Difference]:
    """Find values that are not the same on all ranks.

    Different scripts are an error: two programs in one step, each with its own rank 0, would share
    one key. For commands, GPU models and network settings only the user can decide.
    """
    system = methodcaller("get", "system")
    label = "operating systems differ:"
    yield from ranks.compare("versions", system, "system", label, "HT208.systems", True)
    for name in _VERSIONS:
        one, wrong = itemgetter(name), name != "python"
        yield from ranks.compare("versions", one, name, name, "HT208.versions", wrong)
    for name in ranks.keys("settings"):
        value = methodcaller("get", name)
        yield from ranks.compare("settings", value, name, name, "HT209.settings", True)
    label = "different scripts:"
    yield from ranks.compare("command", itemgetter(0), "script", label, "HT209.scripts", True)
    yield from ranks.compare("gpu_name", str, "gpu_name", "GPU models differ:", "HT113.gpu-models")
    label = "NCCL's and gloo's variables differ:"
    yield from ranks.compare("network", _without_interfaces, "network", label, "HT209.network")
    for name in ranks.keys("code"):
        value, label = methodcaller("get", name), f"{name} differs: version"
        yield from ranks.compare("code", value, "code", label, "HT209.code")


def _shared_gpus(ranks: _Ranks) -> Iterator[Difference]:
    """Find what no process can detect alone: two ranks on one GPU, or a GPU on some ranks only.

    Two ranks on one GPU are slow, and NCCL refuses them unless all ranks allow it.
    """
    groups = ranks.by_value("gpu")
    without = groups.pop(None, [])
    if without and groups:
        where, size = ranks.format_ranks(without), len(ranks.entries)
        error = ContradictionError(
            "HT116.gpu-on-some-ranks", without=where, with_gpu=size - len(without), world_size=size
        )
        yield Difference("GPU", error, True)
    allowed = all(network.get(_MAY_SHARE) == "1" for network, _ in ranks.grouped("network"))
    for gpu, sharing in groups.items():
        if len(sharing) > 1:
            where = ranks.format_ranks(sharing)
            error = ContradictionError("HT113.gpu-shared", gpu=gpu, ranks=where)
            yield Difference("GPU", error, not allowed)


def _other_commands(ranks: _Ranks) -> Iterator[Difference]:
    """Find ranks with other arguments; the values of the arguments are not shown."""
    groups = ranks.by_value("command", tuple)
    if len(groups) > 1:
        commands = list(groups)[:2]
        first, other = (ranks.format_ranks(groups[command]) for command in commands)
        difference = _first_difference(*commands)
        error = ContradictionError("HT209.command", first=first, other=other, difference=difference)
        yield Difference("command", error)


def _without_interfaces(network: Mapping[str, str]) -> str:
    """Return a text to compare and show, without interface names, which may differ by host."""
    return str({name: v for name, v in network.items() if not name.endswith("_IFNAME")})


def _first_difference(first: Sequence[str], second: Sequence[str]) -> str:
    """Describe the first argument in which two commands differ, without its value."""
    for number, (own, other) in enumerate(zip(first, second, strict=False)):
        if own != other:
            a, b = (text.partition("=")[0] for text in (own, other))
            return f"{a} has another value" if a == b else f"{a} and {b} (argument {number})"
    longer = max(first, second, key=len)
    return f"{longer[min(len(first), len(second))].partition('=')[0]} is present only on some ranks"


def _command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with hashed values: `["train.py", "--lr", "--lr=6f4b1c2d"]`."""
    shown = [Path(arguments[0]).name if arguments and arguments[0] else ""]
    before = ""  # the option whose value may follow
    for number, argument in enumerate(arguments[1:_MOST_ARGUMENTS], 1):
        name, value = _OPTION.match(argument).groups()  # type: ignore[union-attr]
        if (name or before) in _OWN_ARGUMENTS:
            before = name if value is None else ""
            continue
        if name and value is None:
            shown.append(name)
        else:
            text = argument if value is None else value
            label = name or before or f"argument {number}"
            shown.append(f"{label}={_short_hash(os.fsencode(text))}")
        before = name if value is None else ""
    return shown


def _code() -> dict[str, str]:
    """Return a hash by file: the script, and the modules in its folder that are imported so far."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return {}
    folder = os.path.join(os.path.dirname(os.path.abspath(script)), "")
    # torch loads more than a thousand modules, and a look at each takes milliseconds after a fork.
    names = list(sys.modules)
    tops = {name for name in names if "." not in name} - sys.stdlib_module_names
    own = tuple(f"{top}." for top in tops if _place(top).startswith(folder))
    loaded = {_place(name) for name in names if f"{name}.".startswith(own)}
    inside = (f for f in loaded if f.startswith(folder) and f.endswith(".py"))
    files = [script, *sorted(f for f in inside if "site-packages" not in f)[:_MOST_FILES]]
    hashes = {}
    for path in files:
        try:
            content = Path(path).read_bytes()
        except OSError:
            continue  # deleted since it was imported
        hashes[os.path.relpath(path, folder)] = _short_hash(content)
    return hashes


def _place(name: str) -> str:
    """Return the file of a module, or the folder of a package that has none; else an empty text."""
    module = sys.modules.get(name)
    return str(getattr(module, "__file__", None) or [*getattr(module, "__path__", ()), ""][0])


def _gpu(device: torch.device) -> str:
    """Return an identifier that is unique among the GPUs of all hosts."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid:
        return str(uuid)
    parts = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    bus = [getattr(properties, part, None) for part in parts]
    where = ":".join(f"{n:02x}" for n in bus if n is not None) or str(device.index)
    return f"{os.uname().nodename} {where}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
