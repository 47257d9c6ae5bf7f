"""Texts in messages: ranks, lists, suggestions, and values on a terminal."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.texts import listed, nearest, printable, ranks_text

HOSTS = ["node1", "node1", "node2", "node2"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([5, 3], "ranks 3 and 5"),
        ([0, 1], "ranks 0 and 1"),
        ([3, 5, 7, 8, 9], "ranks 3, 5 and 7-9"),
        (range(4096), "ranks 0-4095"),
        (range(0, 4096, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, … (2048 ranks)"),
    ],
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 20), min_size=1, max_size=8))
def test_ranks_text_names_each_rank(ranks):
    named = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranks_text(ranks)):
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


def test_ranks_text_with_hosts():
    assert ranks_text([2], HOSTS) == "rank 2 on node2"
    assert ranks_text([1, 0], HOSTS) == "ranks 0 and 1 on node1"
    assert ranks_text([0, 3], dict(enumerate(HOSTS))) == "ranks 0 and 3 on node1 and node2"


def test_listed_words():
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh")) == "a, b, c, d, e, f, g and h"
    assert listed(list("abcdefghi")) == "a, b, c, d, e, f, g, h, …"


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("global_bach", "global_batch"),
        ("global-batch", "global_batch"),
        ("GLOBAL_BATCH", "global_batch"),
        ("seeds", "seed"),
        ("weights", ""),
        ("", ""),
    ],
)
def test_nearest_word(word, found):
    assert nearest(word, ["seed", "global_batch"]) == found


def test_nearest_word_above_a_cutoff():
    assert nearest("container-image", ["container"], cutoff=0.7) == "container"
    assert nearest("container-image", ["container"], cutoff=0.8) == ""


def test_printable_escapes():
    assert printable("a\x1b[2J\r\n\u202e\udcff é\\") == r"a\x1b[2J\r\n\u202e\udcff é\\"[:-1]
    assert printable(None) == "None"


@given(st.text())
def test_printable_text_is_one_line(text):
    assert printable(text).isprintable()
