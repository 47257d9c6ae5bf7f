"""The pages of the documentation: their code blocks, and the commands in them."""

import re
import shlex
from typing import NamedTuple

import launches

PAGES = sorted(
    str(path.relative_to(launches.TOP))
    for pattern in ("*.md", "docs/**/*.md")
    for path in launches.TOP.glob(pattern)
    if path.name != "CHANGELOG.md"  # also names what was there once
)
SHELLS = ("bash", "sh", "console")
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str


def text(page):
    return (launches.TOP / page).read_text()


def blocks(page, *languages):
    """Return the code blocks of a page in these languages, in their order."""
    return blocks_in(text(page), *languages)


def blocks_in(text, *languages):
    return [
        Block(language, re.sub(f"^{indent}", "", code, flags=re.MULTILINE))
        for indent, language, code in _BLOCK.findall(text)
        if language in languages
    ]


def spans(page):
    """Return what stands in backticks outside of code blocks."""
    return re.findall(r"`([^`]+)`", _BLOCK.sub("", text(page)))


def is_script(block):
    """Tell whether a block is a file that begins with the program that runs it."""
    return block.text.startswith("#!")


def commands(block):
    """Return the commands of a block: lines with what continues them, without comments.

    A block of `console` has them after `$`, and what they print.
    """
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found, begun = [], ""
    for line in lines:
        begun += line
        try:
            ends = not line.endswith("\\") and shlex.split(begun, comments=True) is not None
        except ValueError:  # in a quoted text of several lines
            ends = False
        if not ends:
            begun += "\n"
            continue
        command = re.sub(r"(^|\s+)#\s.*$", "", begun) if "\n" not in begun else begun
        found += [command] if command else []
        begun = ""
    return found


def simple_commands(command):
    """Yield the words of each simple command of a line of the shell.

    Words before the program are left out: `exec`, and variables.
    """
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("();<>|&"):
            words.append(word)
            continue
        while words and (words[0] == "exec" or re.match(r"\w+=", words[0])):
            del words[0]
        if words:
            yield words
        words = []


def commands_in_sentences(page):
    """Return the spans that can be read as a line of the shell."""
    found = []
    for span in spans(page):
        try:
            words = list(simple_commands(span))
        except ValueError:
            continue
        found += [span] if words else []
    return found


def commands_of(page):
    """Return the commands of all blocks of a page, without those of scripts."""
    return [command for block in blocks(page, *SHELLS) for command in commands(block)]
