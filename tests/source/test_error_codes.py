"""Error texts: each raise names a message of codes.toml and fills all of its placeholders."""

import ast
import json
import os
import pickle
import re
import string
import textwrap
from pathlib import Path

import pytest

from hpctrain import errors
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.errors.codes import codes, message

TOP = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("messages.txt")
KEY = re.compile(r"HT\d{3}\.[a-z0-9-]+")
KINDS = {name for name in errors.__all__ if name.endswith("Error")}
MOST_LINES = 3
TEMPLATES = {
    f"{code}.{key}": template
    for code, entry in codes().items()
    for key, template in entry.messages.items()
}


def sources():
    files = [*(TOP / "hpctrain").rglob("*.py"), *(TOP / "examples").glob("*.py")]
    return {path.relative_to(TOP): ast.parse(path.read_text()) for path in sorted(files)}


def keys():
    """Yield place, parent and node of each constant that is the key of a message."""
    for path, tree in sources().items():
        for parent in ast.walk(tree):
            for node in ast.iter_child_nodes(parent):
                text = getattr(node, "value", None)
                if isinstance(node, ast.Constant) and isinstance(text, str) and KEY.fullmatch(text):
                    yield f"{path}:{node.lineno}", parent, text


def placeholders(key):
    template = TEMPLATES[key]
    texts = (template.found, template.expected, *template.fixes)
    names = (name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name)
    return {re.split(r"[.\[]", name)[0] for name in names}


def test_each_raise_names_a_message_and_each_message_has_a_raise():
    used = {key for _, _, key in keys()}
    assert sorted(used - set(TEMPLATES)) == []
    assert sorted(set(TEMPLATES) - used) == []


def test_each_raise_fills_exactly_the_placeholders_of_its_message():
    wrong = []
    for place, parent, key in keys():
        name = ""
        if isinstance(parent, ast.Call):
            name = getattr(parent.func, "id", getattr(parent.func, "attr", ""))
        if name in KINDS or name.endswith("Error"):
            given = {keyword.arg for keyword in parent.keywords}
            if None not in given and given != placeholders(key):
                wrong.append(f"{place}: {key}: {sorted(given ^ placeholders(key))}")
    assert not wrong, "\n".join(wrong)


def test_a_raise_takes_at_most_three_lines():
    long = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                key = getattr(node.args[0], "value", None) if node.args else None
                lines = node.end_lineno - node.lineno + 1
                if isinstance(key, str) and KEY.fullmatch(key) and lines > MOST_LINES:
                    long.append(f"{path}:{node.lineno}: {lines} lines")
    assert not long, "\n".join(long)


def test_errors_are_raised_with_a_key_and_not_with_a_text():
    texts = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS and node.args:
                first = node.args[0]
                if isinstance(first, ast.JoinedStr) or (
                    isinstance(first, ast.Constant) and not KEY.fullmatch(str(first.value))
                ):
                    texts.append(f"{path}:{node.lineno}: {ast.unparse(first)}")
    assert not texts, "\n".join(texts)


class Named:
    """A value that prints the name of its placeholder."""

    def __init__(self, name):
        self.name_ = name

    def __format__(self, spec):
        return f"<{self.name_}>"

    __str__ = __repr__ = lambda self: f"<{self.name_}>"

    def __getattr__(self, name):
        return Named(f"{self.name_}.{name}")

    def __getitem__(self, name):
        return Named(f"{self.name_}.{name}")


def named(key):
    return {name: Named(name) for name in placeholders(key)}


def printed():
    """Return every message as it is printed, with the names of its placeholders as values."""
    blocks = []
    for key in TEMPLATES:
        error = textwrap.indent(str(HpctrainError(key, **named(key))), "    ")
        blocks.append(f"{key}\n{error}\n")
    return "\n".join(blocks)


def test_printed_messages_are_the_golden_ones():
    """UPDATE_GOLDEN=1 writes the file; read the diff before you commit it."""
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(printed())
    assert printed() == GOLDEN.read_text()


def test_message_lists_each_fix_of_a_list_and_omits_empty_ones(monkeypatch):
    entry = {"messages": {"many": errors.codes.Message("HT999", "{a}", "", ("{b}", "{c}", "d"))}}
    monkeypatch.setitem(codes(), "HT999", errors.codes.Code("m", (), **entry))
    assert message("HT999.many", a=1, b=["x", "y"], c="").fixes == ("x", "y", "d")


def test_paths_in_fixes_are_quoted_for_a_shell_and_those_in_facts_are_not():
    error = HpctrainError(
        "HT916.cannot-copy-wheel", folder=Path("a b"), error="", wheel=Path("a b")
    )
    assert error.found.startswith("cannot write a b:")
    assert "pip install 'a b' (the wheel that was built)" in error.fixes


def test_exception_of_a_script_keeps_its_text_and_arguments():
    class Own(UsageError):
        def __init__(self, number):
            super().__init__(f"number {number} is wrong {{as it is}}")
            self.number = number

    error = Own(3)
    assert str(error) == error.found == "number 3 is wrong {as it is}"
    assert (error.code, error.fixes, error.exit_code, error.number) == ("", (), 2, 3)
    assert str(UsageError("HT999.unknown")) == "HT999.unknown"


@pytest.mark.parametrize("key", list(TEMPLATES)[:3])
def test_error_survives_pickling(key):
    error = UsageError(key, **named(key)).of_all(2)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.args) == (UsageError, str(error), error.args)
    assert copy.reported_by_rank_0
    assert json.loads(json.dumps(copy.args)) == list(error.args)


def test_texts_of_error_codes_are_sentences():
    for code, entry in codes().items():
        for text in (entry.meaning, *entry.causes):
            assert text.endswith("."), (code, text)
            assert "  " not in text, (code, text)


def test_fixes_of_messages_are_a_list_and_not_one_text():
    for key, template in TEMPLATES.items():
        assert not [fix for fix in template.fixes if "    " in fix or " or: " in fix], key
