"""The consistency check at start: the entry of each rank, and the values that must be equal."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hpctrain._version import __version__
from hpctrain.cluster import env_vars, visible_gpus
from hpctrain.cluster.texts import printable, ranks_text
from hpctrain.errors import ContradictionError
from hpctrain.process.logging import logger

__all__ = ["Difference", "check", "differences", "entry"]

# Their values are sent to the other ranks and may be shown to the user, so no variable that may
# hold a password.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
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
        found: text that lists which ranks have which value.
        expected, fixes: texts as in an error.
        code: code of the error, if the ranks cannot train together or would train something other
            than intended; "" for a warning.
    """

    subject: str
    found: str
    expected: str
    fixes: tuple[str, ...]
    code: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it is an error."""
        return bool(self.code)


def entry(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data about this rank for the rendezvous, as JSON values.

    Args:
        device: device used by this rank.
        settings: options that decide the results of the training, by flag.

    Returns:
        `gpu` (its UUID, else PCI address; None for a CPU), `gpu_name`, `visible` (devices, by
        variable), `versions`, `settings`, `command` (its values are hashed, as they may be
        passwords), `code` (a hash by file: the script and the modules in its folder that are
        imported so far), `network` (settings of NCCL, gloo and similar).
    """
    cuda = device.type == "cuda"
    return {
        "gpu": _gpu(device) if cuda else None,
        "gpu_name": torch.cuda.get_device_name(device) if cuda else None,
        "visible": {name: os.environ[name] for name in _VISIBLE if name in os.environ},
        "versions": {
            "hpctrain": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda or torch.version.hip,
            "nccl": _nccl() if cuda else None,
            "horovod": _version("horovod"),
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
            raise ContradictionError(
                difference.code, difference.found, difference.expected, *difference.fixes
            )
    for difference in found:
        logger.warning("%s; fix: %s", difference.found, "; or: ".join(difference.fixes))


def differences(entries: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Sequence[Difference]:
    """Return the differences between the ranks, the wrong ones first.

    Args:
        entries: result of `entry` on each rank, by rank.
        hosts: host name of each rank, by rank.
    """
    ranks = _Ranks(entries, hosts)
    found = [
        *_shared_gpus(ranks),
        *_versions(ranks),
        *_settings(ranks),
        *_program(ranks),
        *_code_differs(ranks),
    ]
    return sorted(found, key=lambda difference: not difference.wrong)


class _Ranks:
    """The entries of all ranks, with methods to group and format ranks."""

    def __init__(self, entries: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
        self.entries = entries
        self.hosts = hosts

    def by_value(self, value: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[int]]:
        """Return the ranks that have each value, the value of rank 0 first."""
        groups: dict[Any, list[int]] = {}
        for rank, entry in enumerate(self.entries):
            groups.setdefault(value(entry), []).append(rank)
        return groups

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


def _shared_gpus(ranks: _Ranks) -> Iterable[Difference]:
    """Find what no process can detect alone: two ranks on one GPU, or a GPU on some ranks only.

    Two ranks on one GPU are slow, and NCCL refuses them unless all ranks allow it.
    """
    groups = ranks.by_value(lambda entry: entry["gpu"])
    without = groups.pop(None, [])
    cpu = f"to train on the CPU: env {visible_gpus.CUDA}= python SCRIPT"
    if without and groups:
        yield Difference(
            "GPU",
            f"torch sees no GPU at {ranks.format_ranks(without)}; the other "
            f"{len(ranks.entries) - len(without)} ranks have one",
            "a GPU for every rank, or for none",
            ("run nvidia-smi on these hosts", cpu),
            "HT116",
        )
    allowed = all(entry["network"].get(_MAY_SHARE) == "1" for entry in ranks.entries)
    for gpu, sharing in groups.items():
        if len(sharing) > 1:
            yield Difference(
                "GPU",
                f"one GPU ({gpu}) is shared by {ranks.format_ranks(sharing)}",
                "a GPU of its own for each rank",
                ("start as many ranks on each host as it has GPUs", cpu),
                "" if allowed else "HT113",
            )


# Whether different versions are an error, as messages between ranks fail; otherwise a warning.
_VERSIONS = {"hpctrain": True, "torch": True, "cuda": True, "nccl": True, "python": False}


def _versions(ranks: _Ranks) -> Iterable[Difference]:
    uses_horovod = any(entry["settings"].get("--backend") == "horovod" for entry in ranks.entries)
    for name, wrong in {**_VERSIONS, "horovod": uses_horovod}.items():
        groups = ranks.by_value(lambda entry, name=name: entry["versions"][name])  # type: ignore[misc]
        if len(groups) > 1:
            yield Difference(
                name,
                ranks.format_values(groups, name),
                f"one version of {name}",
                (
                    "load the same environment on all hosts, in the batch script",
                    "put the environment where all hosts see it",
                ),
                "HT208" if wrong else "",
            )


def _settings(ranks: _Ranks) -> Iterable[Difference]:
    names = dict.fromkeys(name for entry in ranks.entries for name in entry["settings"])
    for name in names:
        groups = ranks.by_value(lambda entry, name=name: entry["settings"].get(name))  # type: ignore[misc]
        if len(groups) > 1:
            yield Difference(
                name,
                ranks.format_values(groups, name),
                f"the same {name} on all ranks, as it affects the training",
                ("one command line for all ranks",),
                "HT209",
            )


def _program(ranks: _Ranks) -> Iterable[Difference]:
    """Find differences in script, command, GPU model and network settings.

    Different scripts are an error: two programs in one step, each with its own rank 0, would share
    one key. For the rest, only the user can decide whether a difference is allowed.
    """
    groups = ranks.by_value(lambda entry: entry["command"][0])
    if len(groups) > 1:
        yield Difference(
            "script",
            ranks.format_values(groups, "different scripts:"),
            "one script for all ranks",
            ("start each with an srun of its own", "give each its own HPCTRAIN_SECRET"),
            "HT209",
        )
    groups = ranks.by_value(lambda entry: tuple(entry["command"]))
    if len(groups) > 1:
        first, other = list(groups)[:2]
        yield Difference(
            "command",
            f"{ranks.format_ranks(groups[first])}, and {ranks.format_ranks(groups[other])}, were "
            f"started with different commands: {_first_difference(first, other)}",
            "one command line for all ranks",
            ("check how each rank is started",),
        )
    for subject, name, fix in (
        ("gpu_name", "GPUs of different kinds:", "one kind: srun --constraint=…, --gpus=KIND:N"),
        ("network", "NCCL's and gloo's variables differ:", "export them for all ranks alike"),
    ):
        groups = ranks.by_value(lambda entry, subject=subject: _text(entry[subject]))  # type: ignore[misc]
        if len(groups) > 1:
            yield Difference(
                subject, ranks.format_values(groups, name), "the same on all ranks", (fix,)
            )


def _code_differs(ranks: _Ranks) -> Iterable[Difference]:
    """Find files whose content differs between ranks, such as a stale copy on one host."""
    names = dict.fromkeys(name for entry in ranks.entries for name in entry["code"])
    for name in names:
        groups = ranks.by_value(lambda entry, name=name: entry["code"].get(name))  # type: ignore[misc]
        groups.pop(None, None)  # not imported there: a script may import by rank
        if len(groups) > 1:
            yield Difference(
                "code",
                ranks.format_values(groups, f"{name} differs: version"),
                "the same code on all ranks",
                ("copy it again to where the ranks read it",),
            )


def _text(value: object) -> str:
    """Return a text to compare and show, without interface names, which may differ by host."""
    if isinstance(value, Mapping):
        value = {name: v for name, v in value.items() if not name.endswith("_IFNAME")}
    return str(value)


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
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    inside = {f for f in loaded if f and f.startswith(folder) and f.endswith(".py")}
    files = [script, *sorted(f for f in inside if "site-packages" not in f)[:_MOST_FILES]]
    hashes = {}
    for path in files:
        try:
            content = Path(path).read_bytes()
        except OSError:
            continue  # deleted since it was imported
        hashes[os.path.relpath(path, folder)] = _short_hash(content)
    return hashes


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


def _nccl() -> str:
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
