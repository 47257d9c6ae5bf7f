"""What a script needs from its launcher, by its source and that of its project's modules.

The source is read, not run. A name that the program puts together is not seen.
"""

import ast
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.launch.rank_output import announce

__all__ = ["Source", "read"]

_METHODS = ("setdefault", "pop", "update", "putenv", "__setitem__")
_MOST_FILES = 300
# Variables of launchers, and the method that reads them.
_RANK = re.compile(r"(LOCAL_|HOROVOD_|PMI_|OMPI_COMM_WORLD_)?RANK|SLURM_PROCID|env://")
_LOCAL_RANK = ("--local_rank", "--local-rank")
# Libraries that open a process group themselves.
_CONNECT = {
    *("accelerate", "transformers", "ignite", "deepspeed", "horovod", "mpi4py"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "torchtitan", "monai"),
}
_STARTERS = ("spawn", "start_processes", "Process")


@dataclass(slots=True)
class Source:
    """What the source of a script and of its project's modules says.

    Attributes:
        imports: names of the modules that are imported.
        opens: whether a Session of hpctrain is named.
        variables: variables of the environment that are set, and the first place of each.
        reads_rank: whether a variable with the rank is named.
        starts_processes: where `torch.multiprocessing` starts processes; empty for nowhere.
        starts_always: whether it starts them under no condition.
        connects: whether a process group is opened, or a library imported that may do so.
        numbers_ranks: whether a process group is opened with a rank of the script's own.
        local_rank: option of the script's parser for the local rank, as torch.distributed.launch
            passes it; empty for none.
        fabric: whether a Fabric of Lightning is made, and its `launch` not called.
    """

    imports: set[str] = field(default_factory=set)
    opens: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    reads_rank: bool = False
    starts_processes: str = ""
    starts_always: bool = False
    connects: bool = False
    numbers_ranks: bool = False
    local_rank: str = ""
    fabric: bool = False

    def check(self, ranks: int) -> None:
        """Check whether the script can be one of several ranks.

        Raises:
            UsageError: it starts its ranks itself, and takes no rank from its environment.
        """
        starts = self.starts_processes and self.numbers_ranks
        alone = self.starts_always or not self.reads_rank
        if ranks > 1 and starts and alone and not (self.opens or "horovod.torch" in self.imports):
            place = self.starts_processes
            raise UsageError("HT805.script-starts-its-ranks", place=place, ranks=ranks)

    @property
    def serves_store(self) -> bool:
        """Whether rank 0 serves torch's store, and not the launcher: at a port of the script."""
        return "MASTER_PORT" in self.variables

    def command(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return the command of a rank: with the option for the local rank if the script has one.

        Args:
            command: command that is the same for all ranks.
            environ: environment of the rank.
        """
        given = any(word.partition("=")[0] in _LOCAL_RANK for word in command)
        if not self.local_rank or given or "HPCTRAIN_LOCAL_RANK" not in environ:
            return list(command)
        words = _words(command)
        after = len(command) - len(words) + (2 if words[0] == "-m" else 1)
        option = f"{self.local_rank}={environ['HPCTRAIN_LOCAL_RANK']}"
        return [*command[:after], option, *command[after:]]

    def environ(self, environ: Mapping[str, str], port: int | None) -> dict[str, str]:
        """Return the variables of a rank that differ because of the script.

        Args:
            environ: environment of the rank.
            port: free port at MASTER_ADDR; None for none.
        """
        more = {}
        if port and (self.serves_store or environ.get("WORLD_SIZE") == "1"):
            more = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        if self.fabric and "LOCAL_WORLD_SIZE" in environ:
            more |= {
                "LT_CLI_USED": "1",
                "LT_DEVICES": environ["LOCAL_WORLD_SIZE"],
                "LT_NUM_NODES": environ["GROUP_WORLD_SIZE"],
            }
        return more

    def announce(self) -> None:
        """Print what the ranks get because of the script."""
        if self.local_rank:
            announce(f"each rank gets {self.local_rank}, as the script has this option")


def read(command: Sequence[str], folder: str, environ: Mapping[str, str]) -> Source:
    """Read the script of a command, and the modules of its project that it imports.

    Args:
        command: program and arguments of each rank.
        folder: its working directory.
        environ: environment of a rank.

    Returns:
        What they say; an empty one for another program than a script or module of this Python,
        which may have other packages.
    """
    words, source = _words(command), Source()
    is_script = bool(words) and (words[0] == "-m" or not words[0].startswith("-"))
    if not (command[0] == sys.executable and is_script):
        return source
    path = list(filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))
    if words[0] == "-m":
        project = _Project([folder, *path], words[1].partition(".")[0])
        waiting = [*project.files(words[1]), *project.files(f"{words[1]}.__main__")]
    else:
        script = Path(folder, words[0])
        first = os.path.dirname(os.path.realpath(script))
        project = _Project([first, *path])
        waiting = [("__main__", script)]
    seen = set[Path]()
    launches = has_parser = False
    while waiting and len(seen) < _MOST_FILES:
        module, file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            text = file.read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        fresh = set(_imports(tree, module, file.name == "__init__.py")) - source.imports
        source.imports |= fresh
        waiting += [found for name in fresh for found in project.files(name)]
        source.opens = source.opens or (b"hpctrain" in text and b"Session" in text)
        facts = _Facts(tree, os.path.relpath(file, folder))
        source.variables = {**facts.variables, **source.variables}
        source.reads_rank |= facts.reads_rank
        source.starts_processes = source.starts_processes or facts.starts_processes
        source.starts_always |= facts.starts_always
        source.connects |= facts.connects
        source.numbers_ranks |= facts.numbers_ranks
        # The parser of an imported module may be that of another program.
        source.local_rank = source.local_rank or ("" if has_parser else facts.local_rank)
        has_parser |= facts.has_parser
        source.fabric |= facts.fabric
        launches |= facts.launches
    source.connects |= any(name.partition(".")[0] in _CONNECT for name in source.imports)
    source.fabric &= not launches and any("lightning" in name for name in source.imports)
    return source


def _words(command: Sequence[str]) -> list[str]:
    """Return the words of a command from the script or -m on."""
    words = list(command[1:])
    return words[1:] if words[:1] == ["-P"] else words


class _Facts:
    """What one file says; the attributes are those of `Source`.

    Args:
        tree: syntax tree of the file.
        name: name of the file, for places.

    Attributes:
        has_parser: whether it adds an argument to a parser.
        launches: whether it calls a method `launch`.
    """

    def __init__(self, tree: ast.Module, name: str) -> None:
        self._name = name
        self.variables: dict[str, str] = {}
        self.starts_processes = self.local_rank = ""
        self.reads_rank = self.connects = self.numbers_ranks = self.fabric = False
        self.has_parser = self.launches = False
        self._called: dict[str, bool] = {}  # functions, and whether each call has a condition
        self._starts: list[tuple[str, bool]] = []  # function of each start, and the same of it
        self._visit(tree, "", False)
        self.starts_always = any(
            not (condition or self._called.get(function)) for function, condition in self._starts
        )

    def _visit(self, node: ast.AST, function: str, condition: bool) -> None:
        """Look at a node and those below it.

        Args:
            node: the node.
            function: name of the function around it; empty for none.
            condition: whether it is inside of an `if` in this function.
        """
        for variable in _variables(node):
            self.variables.setdefault(variable, self._place(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.reads_rank |= _RANK.fullmatch(node.value) is not None
        elif isinstance(node, ast.Call):
            self._look_at(node, function, condition)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, condition = node.name, False
        elif isinstance(node, (ast.If, ast.IfExp)):
            condition = condition or "__name__" not in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            self._visit(child, function, condition)

    def _place(self, node: ast.AST) -> str:
        return f"{self._name}, line {getattr(node, 'lineno', 0)}"

    def _look_at(self, call: ast.Call, function: str, condition: bool) -> None:
        func = call.func
        name = str(getattr(func, "attr", None) or getattr(func, "id", ""))
        base = getattr(func, "value", None)
        last = getattr(base, "attr", None) or getattr(base, "id", "")
        if base is None:
            self._called[name] = condition and self._called.get(name, True)
        if name == "add_argument":
            self.has_parser = True
            options = [one.value for one in call.args if isinstance(one, ast.Constant)]
            self.local_rank = self.local_rank or next(
                (str(option) for option in options if option in _LOCAL_RANK), ""
            )
        elif name == "init_process_group":
            self.connects = True
            self.numbers_ranks |= any(keyword.arg == "rank" for keyword in call.keywords)
        elif name == "launch":
            self.launches = True
        elif name == "Fabric":
            self.fabric = True
        elif name in _STARTERS and last in ("", "mp", "multiprocessing"):
            self.starts_processes = self.starts_processes or self._place(call)
            self._starts.append((function, condition))


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


def _variables(node: ast.AST) -> Iterator[str]:
    """Yield the names of the variables of the environment that a node of a source sets."""
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
        for key in name.keys if isinstance(name, ast.Dict) else [name]:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def _is_environ(node: ast.expr) -> bool:
    """Check for `os.environ` or `environ`."""
    return isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node).endswith("environ")
