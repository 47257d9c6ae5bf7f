"""Check of a training script's options before its job is submitted; the script is only read.

Only what would certainly fail in the job is refused. The script has to parse its own command line
by `hpctrain.options()`, and to open its Session itself. Its own options are left to it.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

__all__ = ["check"]

# Names in a script whose command line may mean anything.
_UNCLEAR = {
    *("ArgumentParser", "add_subparsers", "parse_intermixed_args", "REMAINDER", "PARSER", "argv"),
    *("conflict_handler", "fromfile_prefix_chars", "parents", "prefix_chars"),
}
_PARSING = ("parse_args", "parse_known_args")
_SETTING = ("Session", "set_defaults")


def check(script: str, words: Sequence[str], ranks: int | None, complete: bool) -> None:
    """Refuse training options with which a script cannot train.

    Args:
        script: path of a Python script.
        words, ranks, complete: as in `early_check.check`.

    Raises:
        UsageError: an option or a value of a recipe is invalid, or contradicts another one.
    """
    found = _set_by(script)
    if found is not None:
        from hpctrain.arguments import early_check  # only for such scripts, as it is slow

        early_check.check(script, words, *found, ranks, complete)


def _set_by(script: str) -> tuple[set[str], bool] | None:
    """Return the names that a script sets itself, and whether it has all training options.

    Return None if its command line may mean anything.
    """
    try:
        source = Path(script).read_bytes()
        tree = ast.parse(source if b"hpctrain" in source else b"")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    own: set[str] = set()  # names that may be set: keywords, attributes, and texts for setattr
    seen: set[str] = set()
    calls: dict[str, ast.Call] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            calls[name] = node
            if name.endswith(_PARSING) and (node.args or node.keywords):
                return None  # the words are not those of its command line
            if name.endswith(_SETTING) and None in [keyword.arg for keyword in node.keywords]:
                return None  # **values
        elif isinstance(node, ast.keyword):
            own.add(node.arg or "")
        elif isinstance(node, ast.Attribute):
            (own if isinstance(node.ctx, ast.Store) else seen).add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)
        elif isinstance(node, ast.Name):
            seen.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.module == "hpctrain":
            seen |= {f"hpctrain.{name.name}" for name in node.names if name.asname is None}
    made = calls.get("hpctrain.options")
    if made is None and "hpctrain.options" in seen:
        made = calls.get("options")
    parses = any(name.endswith(_PARSING) for name in calls)
    opens = any(name.endswith("Session") for name in calls)
    if made is None or not parses or not opens or _UNCLEAR & (own | seen):
        return None
    recipe = [keyword.value for keyword in made.keywords if keyword.arg in ("recipe", None)]
    values = [value.value for value in recipe if isinstance(value, ast.Constant)]
    return (own, values == [True]) if len(recipe) == len(values) else None
