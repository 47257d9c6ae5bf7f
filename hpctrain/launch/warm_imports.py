"""Decision whether one process imports torch for all ranks of a host; see `fork_server`.

The script and the modules of its project are read, not run. An import or a variable whose name the
program puts together is not seen.
"""

import ast
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster import env_vars, system
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import Imports
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
_CHANGES = re.compile(rb"environ|putenv")
_METHODS = ("setdefault", "pop", "update", "putenv", "__setitem__")
_MOST_FILES = 300


class _Script(NamedTuple):
    """What the source of a script and of its project's modules says.

    Attributes:
        imports: names of the modules that are imported.
        opens: whether a Session of hpctrain is named.
        sets: where one of the variables is set that are read once; empty for nowhere.
    """

    imports: set[str]
    opens: bool
    sets: str


def of_command(
    command: Sequence[str],
    folder: str,
    environs: Sequence[Mapping[str, str]],
    cores: Sequence[Set[int]] | None = None,
    announces: bool = True,
    alone: bool = False,
) -> Imports | None:
    """Return what one process imports for the ranks of a host; None if each imports it itself.

    Args:
        command: program and arguments of each rank.
        folder: its working directory.
        environs: environment of each rank of this host.
        cores: cores of each rank; None if they are not bound.
        announces: whether to print why each rank imports torch itself, if it does.
        alone: whether the process may serve a single rank, of one attempt after another.
    """
    words = list(command[1:])
    words = words[1:] if words[:1] == ["-P"] else words
    is_script = bool(words) and (words[0] == "-m" or not words[0].startswith("-"))
    first, *others = environs
    # Another Python than this one may have other packages.
    if not ((others or alone) and is_script and command[0] == sys.executable and _may_fork(first)):
        return None
    script = _read(words, folder, first.get("PYTHONPATH", "").split(os.pathsep))
    tops = {name.partition(".")[0] for name in script.imports}
    if not (script.opens or _WITH_TORCH & (tops | script.imports)):
        return None
    obstacle = _obstacle(first) or script.sets
    if obstacle:
        if announces:
            announce(f"each rank imports torch itself: {obstacle}")
        return None
    names = [*sorted(tops & _WITHOUT_RANK), *([_SESSION] if script.opens else [])]
    if script.opens or "torch.optim" in script.imports:
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


def _read(words: Sequence[str], folder: str, path: Sequence[str]) -> _Script:
    """Read a script, or a module after -m, and the modules of the project that it imports."""
    if words[0] == "-m":
        project = _Project([folder, *filter(None, path)], words[1].partition(".")[0])
        waiting = [*project.files(words[1]), *project.files(f"{words[1]}.__main__")]
    else:
        script = Path(folder, words[0])
        first = os.path.dirname(os.path.realpath(script))
        project = _Project([first, *filter(None, path)])
        waiting = [("__main__", script)]
    imports: set[str] = set()
    opens, sets, seen = False, "", set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        module, file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            source = file.read_bytes()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        fresh = set(_imports(tree, module, file.name == "__init__.py")) - imports
        imports |= fresh
        waiting += [found for name in fresh for found in project.files(name)]
        opens = opens or (b"hpctrain" in source and b"Session" in source)
        if not sets and _CHANGES.search(source):
            line, name = next(_variables(tree), (0, ""))
            sets = f"{os.path.relpath(file, folder)}, line {line}, sets {name}" if name else ""
    return _Script(imports, opens, sets)


class _Project:
    """The modules of a project: below some folders, in an editable install, or of one package.

    Args:
        folders: first entries of `sys.path` in a rank.
        package: package that belongs to the project, wherever it is.
    """

    def __init__(self, folders: Sequence[str], package: str = "") -> None:
        self._folders, self._package = folders, package
        self._specs: dict[str, ModuleSpec | None] = {}
        paths = sysconfig.get_paths()
        self._installed = tuple({paths[name] for name in ("stdlib", "purelib", "platlib")})

    def files(self, name: str) -> Iterator[tuple[str, Path]]:
        """Yield the names and files of a module and of the packages around it."""
        top, *parts = name.split(".")
        if top not in self._specs:
            self._specs[top] = self._spec(top)
        spec = self._specs[top]
        if spec is None:
            return
        if spec.origin and spec.origin.endswith(".py"):
            yield top, Path(spec.origin)
        for place in spec.submodule_search_locations or ():
            module, here = top, Path(place)
            for part in parts:
                module, here = f"{module}.{part}", here / part
                for file in (here.with_suffix(".py"), here / "__init__.py"):
                    if file.is_file():
                        yield module, file

    def _spec(self, top: str) -> ModuleSpec | None:
        try:
            spec = PathFinder.find_spec(top, list(self._folders)) or importlib.util.find_spec(top)
        except (ImportError, ValueError, AttributeError):
            return None
        is_own = top in (self._package, "__main__")
        if spec is None or top == "hpctrain" or (not is_own and not self._is_of_project(spec)):
            return None
        return spec

    def _is_of_project(self, spec: ModuleSpec) -> bool:
        place = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        return bool(os.path.isabs(place)) and not place.startswith(self._installed)


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Yield the names of the modules that a source may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "optim":
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) + is_package - node.level]
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable that is read once and that a source sets."""
    for node in ast.walk(tree):
        names: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            names = [node.slice] if _is_environ(node.value) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method in _METHODS and (method == "putenv" or _is_environ(node.func.value)):
                names = [*node.args[:1], *(ast.Constant(one.arg) for one in node.keywords)]
        elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
            names = [node.value]
        for name in names:
            keys = name.keys if isinstance(name, ast.Dict) else [name]
            for key in keys:
                text = key.value if isinstance(key, ast.Constant) else None
                if isinstance(text, str) and READ_ONCE.fullmatch(text):
                    yield getattr(node, "lineno", 0), text


def _is_environ(node: ast.expr) -> bool:
    """Check for `os.environ` or `environ`."""
    return isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node).endswith("environ")
