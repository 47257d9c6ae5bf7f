"""Codes of errors: each place that raises one names a code of the table, and no code is unused."""

import ast
import re
from pathlib import Path

from hpctrain import errors
from hpctrain.errors.codes import CODES

TOP = Path(__file__).resolve().parents[2]
KINDS = {name for name in errors.__all__ if name.endswith("Error")}
CODE = re.compile(r"HT\d{3}")


def sources():
    files = [*(TOP / "hpctrain").rglob("*.py"), *(TOP / "examples").glob("*.py")]
    return {path: ast.parse(path.read_text()) for path in files}


def test_error_codes_in_source_are_those_of_the_table():
    used = {
        node.value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and CODE.fullmatch(node.value)
    }
    assert used == set(CODES)


def test_errors_are_made_with_a_code_first():
    without = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            name = (
                getattr(node.func, "id", getattr(node.func, "attr", ""))
                if isinstance(node, ast.Call)
                else ""
            )
            if name in KINDS:
                first = node.args[0]
                text = first.value if isinstance(first, ast.Constant) else ast.unparse(first)
                if not (CODE.fullmatch(str(text)) or "code" in text or text.startswith("*")):
                    without.append(f"{path.relative_to(TOP)}:{node.lineno}: {text}")
    assert not without, "\n".join(without)


def test_fixes_of_errors_are_a_list_and_not_one_text():
    joined = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS:
                texts = [
                    part.value
                    for fix in node.args[3:]
                    for part in ast.walk(fix)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                if any("    " in text or " or: " in text for text in texts):
                    joined.append(f"{path.relative_to(TOP)}:{node.lineno}")
    assert not joined, "\n".join(joined)


def test_texts_of_error_codes_are_sentences():
    for code, entry in CODES.items():
        for text in (entry.meaning, *entry.causes, entry.fix):
            assert text.endswith("."), (code, text)
            assert "  " not in text, (code, text)
