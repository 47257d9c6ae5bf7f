"""Quoting of any text for bash and for lines of #SBATCH."""

import os
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpctrain.jobs.quoting import directive, quote

# Any argument: text, and bytes that are not UTF-8 as os.fsdecode returns them.
ARGUMENT = st.binary(max_size=30).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


def printed_words(script):
    """Return what `printf '%s\0'` of a script prints."""
    done = subprocess.run(
        ["bash", "-c", os.fsencode(script)], stdout=subprocess.PIPE, timeout=120, check=True
    )
    return done.stdout.split(b"\0")[:-1]


@given(st.lists(ARGUMENT | TEXT, min_size=20, max_size=60))
@example(
    ["", "'", "''", "a'b", "\\", "\\'", "$'x'", "\n", "\r\n", "!", "~", "\x01", "\x7f", "\xa0"]
)
@example(
    ["\udcff", "\udcc3\udca9", "é\n", "\u2028", "-n", "*", "#", "a=b", "{a,b}", "\\n\n", "\x1b["]
)
def test_quoted_words_are_read_back_by_bash(texts):
    words, given_bytes = [quote(text) for text in texts], [os.fsencode(text) for text in texts]
    assert printed_words(f"printf '%s\\0' {' '.join(words)}") == given_bytes
    for one in words:
        assert one.isprintable(), "on one line, and readable"


def test_quoting_leaves_plain_words():
    assert [quote(text) for text in ("train.py", "--lr=0.1", "a b", "it's", "a\nb")] == [
        *("train.py", "--lr=0.1", "'a b'", "'it'\"'\"'s'", r"$'a\nb'")
    ]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("plain-1.2_%j/x", "#SBATCH --name=plain-1.2_%j/x"),
        ("two words", '#SBATCH --name="two words"'),
        ('a"b\\c#d', r'#SBATCH --name="a\"b\\c#d"'),
        ("", '#SBATCH --name=""'),
        (None, "#SBATCH --name"),
    ],
)
def test_sbatch_directive_quoting(value, line):
    """The same rules are checked with sbatch in test_sbatch_script_on_slurm.py."""
    assert directive("name", value) == line


@pytest.mark.parametrize("value", ["a\nb", "a\r", "\x7f", "\udcff", "a\u2028b", "\t"])
def test_sbatch_directive_refuses_control_characters(value):
    with pytest.raises(ValueError, match="printable"):
        directive("name", value)
