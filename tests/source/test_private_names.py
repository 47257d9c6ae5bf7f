"""Private names of other libraries, which any release may change, are in a table of the docs."""

import ast
import fnmatch
import functools
import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
TITLE = "## Private names of other libraries\n"
PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!__)\Z")
# Python documents these names with an underscore.
DOCUMENTED = {"_exit", "_fields", "_getframe"}


def in_table():
    """Pairs of a file and a private name; a name may end in *."""
    section = (
        (TOP / "docs" / "architecture.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
    )
    pairs = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            names, _, files, _ = line.strip("| ").split(" | ")
            pairs |= {
                (f"hpctrain/{file}", name.rpartition(".")[2])
                for name in re.findall("`([^`]+)`", names)
                for file in re.findall("`([^`]+)`", files)
            }
    return pairs


def imported(tree):
    """The modules of hpctrain that a module imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpctrain."):
            yield node.module


@functools.cache
def defined_in(module):
    path = TOP / module.replace(".", "/")
    package = path / "__init__.py"
    path = package if package.exists() else path.with_suffix(".py")
    return set(defined(ast.parse(path.read_text())))


def defined(tree):
    """Names that a module defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def mentioned(tree):
    """Names of attributes, also in `getattr`, and names that are imported from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hpctrain"):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def foreign(text):
    """Private names in the text of a module that neither it nor what it imports defines."""
    tree = ast.parse(text)
    own = set(defined(tree)).union(*map(defined_in, imported(tree)))
    return {name for name in mentioned(tree) if PRIVATE.match(name)} - own - DOCUMENTED


def test_private_names_of_other_libraries_are_in_the_table():
    table = in_table()
    assert table
    missing = [
        (str(path.relative_to(TOP)), name)
        for path in sorted((TOP / "hpctrain").rglob("*.py"))
        for name in sorted(foreign(path.read_text()))
        if not any(
            file == str(path.relative_to(TOP)) and fnmatch.fnmatchcase(name, listed)
            for file, listed in table
        )
    ]
    assert not missing


def test_table_of_private_names_has_no_name_that_is_gone():
    assert not [
        (file, name)
        for file, name in sorted(in_table())
        if not re.search(rf"\b{name.rstrip('*')}", (TOP / file).read_text())
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._foreach_add_(a, b)",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch.utils._pytree",
        "getattr(scheduler, '_schedulers', ())",
        "class Parser(ArgumentParser):\n    def known(self):\n        return self._actions",
    ],
)
def test_private_name_of_another_library_is_found(text):
    assert foreign(text)


def test_own_private_names_are_not_reported():
    text = "from hpctrain.precision.scaler import LossScaler\nclass Own(LossScaler):\n    "
    text += "def __init__(self):\n        self._own = self._fixed\n        self._own"
    assert foreign(text) == set()
