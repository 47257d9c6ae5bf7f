"""Public names of a package that are imported at their first use.

This file runs on any Python 3, as `hpctrain/__init__.py` does.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy(package: str, home: "Mapping[str, tuple[str, ...]]") -> "Callable[[str], Any]":
    """Return the `__getattr__` of a package (PEP 562) that imports names at their first use.

    The listed modules themselves are names, too: `hpctrain.jobs` after `import hpctrain`.

    Args:
        package: name of the package.
        home: names of each module, by the module's name in the package.
    """
    module_of = {name: module for module, names in home.items() for name in names}

    def get(name: str) -> "Any":
        if name in home:
            return import_module(package + "." + name)
        if name not in module_of:
            raise AttributeError("module {!r} has no attribute {!r}".format(package, name))
        value = getattr(import_module(package + "." + module_of[name]), name)
        # Stored there, so that `__getattr__` is called only once for each name.
        setattr(sys.modules[package], name, value)
        return value

    return get
