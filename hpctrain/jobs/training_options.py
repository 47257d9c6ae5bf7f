"""Check of a training script's options before its job is submitted; the script is only read.

Only what would certainly fail in the job is refused. The script has to parse its own command line
by `hpctrain.options()`, and to open its Session itself. Its own options are left to it.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

from hpctrain.jobs.spec import JobSpec

__all__ = ["check"]

# Names in a script whose command line may mean anything.
_UNCLEAR = {
    *("ArgumentParser", "add_subparsers", "parse_intermixed_args", "REMAINDER", "PARSER", "argv"),
    *("conflict_handler", "fromfile_prefix_chars", "parents", "prefix_chars"),
}
_PARSING = ("parse_args", "parse_known_args")
_SETTING = ("Session", "set_defaults")


def check(spec: JobSpec) -> None:
    """Refuse training options with which a script cannot train, also in a setting of a sweep.

    Args:
        spec: job whose command is a Python, the path of a script, and its options.

    Raises:
        UsageError: an option is invalid, or contradicts another one.
    """
    script, *words = spec.command[1:]
    found = _set_by(script)
    if found is None:
        return
    from hpctrain.arguments import early_check  # only for such scripts, as it is slow

    # With one task, `hpctrain run` starts a rank for each GPU that it finds.
    several = any(part.tasks > 1 for part in spec.parts)
    is_certain = spec.launcher != "none" and (several or all(p.gpus == 1 for p in spec.parts))
    ranks = spec.ranks if is_certain else None
    for setting in spec.sweep or ((),):
        more = [word for name, value in setting for word in (f"--{name}", value)]
        early_check.check(script, [*words, *more], found, ranks)


def _set_by(script: str) -> set[str] | None:
    """Return the names that a script sets itself; None if its command line may mean anything.

    A `*` stands for every name.
    """
    try:
        source = Path(script).read_bytes()
        tree = ast.parse(source if b"hpctrain" in source else b"")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    calls = [(ast.unparse(one.func), one) for one in nodes if isinstance(one, ast.Call)]
    keywords = {one.arg or "" for one in nodes if isinstance(one, ast.keyword)}
    texts = {str(one.value) for one in nodes if isinstance(one, ast.Constant)}
    attributes = [one for one in nodes if isinstance(one, ast.Attribute)]
    stored = {one.attr for one in attributes if isinstance(one.ctx, ast.Store)}
    used = {one.attr for one in attributes} | {one.id for one in nodes if isinstance(one, ast.Name)}
    parses = [one for name, one in calls if name.endswith(_PARSING)]
    sets = [(name, one) for name, one in calls if name.endswith(_SETTING)]
    imported = [
        one for one in nodes if isinstance(one, ast.ImportFrom) and one.module == "hpctrain"
    ]
    made = [(name, one) for name, one in calls if name == "hpctrain.options"] or [
        (name, one) for name, one in calls if name == "options" and imported
    ]
    opens = any(name.endswith("Session") for name, _ in calls)
    if len(made) != 1 or not parses or not opens or _UNCLEAR & (keywords | texts | used):
        return None
    # Words that are not those of the command line, and settings by **values.
    absent = _absent_by_default(nodes)
    if any(set(map(ast.unparse, one.args)) - absent or one.keywords for one in parses):
        return None
    unnamed = [name for name, one in [*sets, *made] if None in [k.arg for k in one.keywords]]
    if any(not name.endswith("set_defaults") for name in unnamed):
        return None
    # Names that may be set: by keywords, attributes, and texts for setattr; * by **values.
    return keywords | texts | stored | ({"*"} if unnamed else set())


def _absent_by_default(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the parameters of functions whose default is None, as in `def parse(words=None)`."""
    names = set()
    for one in nodes:
        if isinstance(one, ast.FunctionDef):
            parameters = [*one.args.posonlyargs, *one.args.args]
            pairs = zip(reversed(parameters), reversed(one.args.defaults), strict=False)
            names |= {arg.arg for arg, value in pairs if ast.unparse(value) == "None"}
    return names
