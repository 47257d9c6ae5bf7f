"""Decision whether one process imports torch for all ranks of a host; see `fork_server`."""

import re
import sys
from collections.abc import Mapping, Sequence, Set
from importlib import metadata

from hpctrain.cluster import env_vars, system
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import Imports
from hpctrain.launch.script_source import Source
from hpctrain.process.read_once import READ_ONCE

__all__ = ["of_command", "of_function"]

# Packages whose import brings torch.
_WITH_TORCH = {
    *("torch", "torchvision", "torchaudio", "torchmetrics", "torchtitan", "horovod.torch"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "ignite", "deepspeed"),
    *("transformers", "diffusers", "peft", "timm", "monai", "kornia", "fastai"),
}
_SESSION = "hpctrain.training.session"
# Packages that a script may import, and that neither look at the rank nor start a thread.
_WITHOUT_RANK = {
    *("torchvision", "torchaudio", "scipy", "pandas", "sklearn", "matplotlib", "PIL", "skimage"),
    *("einops", "safetensors", "tqdm", "yaml", "omegaconf", "h5py"),
}
# An optimizer imports it in its first step.
_OF_OPTIMIZERS = "torch._dynamo"
# Variables that bind threads to cores as libraries are loaded, or of a program that has to see the
# start of each process: a library to load first, a profiler, a debugger, coverage.
_OF_NEW_PROCESSES = re.compile(
    r"OMP_PROC_BIND|OMP_PLACES|GOMP_CPU_AFFINITY|KMP_AFFINITY|LD_PRELOAD|LD_AUDIT|PYTHONINSPECT"
    r"|NSYS_\w+|CUDA_INJECTION64_PATH|COVERAGE_PROCESS_(START|CONFIG)|(PYDEVD|DEBUGPY|PYCHARM)_\w+"
)


def of_command(
    source: Source,
    command: Sequence[str],
    folder: str,
    environs: Sequence[Mapping[str, str]],
    cores: Sequence[Set[int]] | None = None,
    announces: bool = True,
    alone: bool = False,
) -> Imports | None:
    """Return what one process imports for the ranks of a host; None if each imports it itself.

    Args:
        source: what the script of the command says.
        command: program and arguments of each rank.
        folder: its working directory.
        environs: environment of each rank of this host.
        cores: cores of each rank; None if they are not bound.
        announces: whether to print why each rank imports torch itself, if it does.
        alone: whether the process may serve a single rank, of one attempt after another.
    """
    first, *others = environs
    if not ((others or alone) and _may_fork(first)):
        return None
    tops = {name.partition(".")[0] for name in source.imports}
    if not (source.opens or _WITH_TORCH & (tops | source.imports)):
        return None
    obstacle = _obstacle(first) or _set_by(source)
    if obstacle:
        if announces:
            announce(f"each rank imports torch itself: {obstacle}")
        return None
    names = [*sorted(tops & _WITHOUT_RANK), *([_SESSION] if source.opens else [])]
    if source.opens or "torch.optim" in source.imports:
        names.append(_OF_OPTIMIZERS)
    python = command[: 1 + (command[1] == "-P")]
    return _imports_for(python, environs, names, cores[0] if cores else None, folder)


def of_function(environs: Sequence[Mapping[str, str]]) -> Imports | None:
    """Return what one process imports for ranks that call a function of this one; None for nothing.

    Args:
        environs: environment of each rank.
    """
    first = environs[0]
    if len(environs) < 2 or "torch" not in sys.modules or not _may_fork(first):
        return None
    names = sorted({*_WITHOUT_RANK, _SESSION, _OF_OPTIMIZERS} & sys.modules.keys())
    return None if _obstacle(first) else _imports_for([sys.executable], environs, names)


def _imports_for(
    python: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    names: Sequence[str],
    cores: Set[int] | None = None,
    folder: str | None = None,
) -> Imports:
    first, *others = environs
    common = {k: v for k, v in first.items() if all(one.get(k) == v for one in others)}
    if not others:  # not taken for the rank itself by who looks for one
        common = env_vars.scrubbed(common)
    modules = ["numpy", "torch", "hpctrain.process.read_once", *names]
    return Imports(modules, python, common, cores, folder)


def _may_fork(environ: Mapping[str, str]) -> bool:
    """Return whether ranks may be copies; libraries of macOS do not survive a fork."""
    return system.COMPLETE and not environ.get(env_vars.FRESH)


def _obstacle(environ: Mapping[str, str]) -> str:
    """Return what has to see the start of each process; empty for nothing."""
    for name in filter(_OF_NEW_PROCESSES.fullmatch, environ):
        return f"{name} is set"
    for plugin in metadata.entry_points(group="torch.backends"):
        return f"torch loads the backend {plugin.name}, which may not survive a fork"
    return ""


def _set_by(source: Source) -> str:
    """Return where a script sets a variable that is read once; empty for nowhere."""
    for name, place in source.variables.items():
        if READ_ONCE.fullmatch(name):
            return f"{place}, sets {name}"
    return ""
