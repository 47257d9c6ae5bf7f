"""What the source of a script and of its project's modules says; it is read, not run.

An import or a variable whose name the program puts together is not seen.
"""

import ast
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from hpctrain.process.read_once import READ_ONCE

__all__ = ["Source", "read"]

_CHANGES = re.compile(rb"environ|putenv")
_METHODS = ("setdefault", "pop", "update", "putenv", "__setitem__")
_MOST_FILES = 300


class Source(NamedTuple):
    """What the source of a script and of its project's modules says.

    Attributes:
        imports: names of the modules that are imported.
        opens: whether a Session of hpctrain is named.
        sets: where one of the variables is set that are read once; empty for nowhere.
    """

    imports: set[str]
    opens: bool
    sets: str


def read(words: Sequence[str], folder: str, path: Sequence[str]) -> Source:
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
    return Source(imports, opens, sets)


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
