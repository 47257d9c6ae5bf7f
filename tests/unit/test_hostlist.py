"""Host lists mean what `scontrol show hostnames` makes of them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import UsageError
from hpctrain.hostlist import expand, first


@pytest.mark.parametrize(
    ("expression", "hosts"),
    [
        ("login", ["login"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001-3]", ["n001", "n002", "n003"]),
        ("n[9-011]", ["n9", "n10", "n11"]),
        ("n[1,3-4,3]", ["n1", "n3", "n4", "n3"]),
        ("n[2-3],m,n[2-3]", ["n2", "n3", "m", "n2", "n3"]),
        (
            "rack[1-2]node[3-4]",
            ["rack1node3", "rack1node4", "rack2node3", "rack2node4"],
        ),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("a[1-2]b", ["a1b", "a2b"]),
        ("[1-2]x", ["1x", "2x"]),
        ("gpu-a100-[7].site.org", ["gpu-a100-7.site.org"]),
        ("", []),
        ("n1,", ["n1"]),
        (",n1", ["n1"]),
        ("n1,,n2", ["n1", "n2"]),
        ("n1, n2", ["n1", "n2"]),
    ],
)
def test_an_expression_stands_for_these_hosts(expression, hosts):
    assert expand(expression) == hosts


@pytest.mark.parametrize(
    ("expression", "position"),
    [
        ("n[1", 1),
        ("m,n[1", 3),
        ("n]1", 1),
        ("n[1]]", 4),
        ("n[[1]]", 2),
        ("n[]", 2),
        ("n[a]", 2),
        ("n[1-]", 2),
        ("n[1,]", 4),
        ("n[1-2-3]", 2),
        ("n[7,5-3]", 4),
        ("ok[1-2],n[-1]", 10),
        ("n[\u0661-\u0663]", 2),  # digits, but none that Slurm writes
        ("n[0-65536]", 2),
        ("n[1-9999999999999]", 2),
    ],
)
def test_a_malformed_expression_is_refused_with_the_position(expression, position):
    with pytest.raises(UsageError) as caught:
        expand(expression)
    assert f"position {position}:" in caught.value.found
    assert expression in caught.value.found
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("expression", ["r[0-255]n[0-511]", f"n[0-{'9' * 5000}]"])
def test_an_absurd_expression_is_refused_rather_than_tried(expression):
    with pytest.raises(UsageError, match="position"):
        expand(expression)


def test_the_first_host_is_the_first_of_all_and_there_must_be_one():
    assert first("rack[1-2]node[3-4],z") == "rack1node3"
    with pytest.raises(UsageError, match="empty"):
        first(",")


_TEXT = st.from_regex(re.compile(r"[a-z][a-z-]{0,4}"), fullmatch=True)
_RANGE = st.tuples(st.integers(0, 120), st.integers(0, 7), st.integers(1, 4))
_BRACKET = st.lists(_RANGE, min_size=1, max_size=3)
_TERM = st.tuples(_TEXT, st.lists(st.tuples(_BRACKET, st.just("") | _TEXT), max_size=2))


@given(st.lists(_TERM, max_size=4))
def test_any_expression_put_together_from_parts_gives_their_hosts_in_order(terms):
    written, expected = [], []
    for text, brackets in terms:
        expression, names = text, [text]
        for ranges, after in brackets:
            pieces, numbers = [], []
            for low, more, width in ranges:
                start = str(low).zfill(width)
                pieces.append(f"{start}-{low + more}" if more else start)
                numbers += [str(n).rjust(len(start), "0") for n in range(low, low + more + 1)]
            expression += "[" + ",".join(pieces) + "]" + after
            names = [name + number + after for name in names for number in numbers]
        written.append(expression)
        expected += names
    assert expand(",".join(written)) == expected
