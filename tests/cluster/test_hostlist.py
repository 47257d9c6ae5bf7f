"""Host lists expand as by `scontrol show hostnames`; see test_hostlist_scontrol.py."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.cluster.hostlist import compress, expand
from hpctrain.errors import UsageError

# Expressions and their hosts; test_hostlist_scontrol.py compares them with scontrol.
EXPANDED = [
    ("login", ["login"]),
    ("n1,n2", ["n1", "n2"]),
    ("n[0-2]", ["n0", "n1", "n2"]),
    ("n[8-11]", ["n8", "n9", "n10", "n11"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ("n[001-3]", ["n001", "n002", "n003"]),
    ("n[9-011]", ["n9", "n10", "n11"]),
    ("n[1,01,001]", ["n1", "n01", "n001"]),
    ("n[1,3-4,3]", ["n1", "n3", "n4", "n3"]),
    ("n[2-3],m,n[2-3]", ["n2", "n3", "m", "n2", "n3"]),
    (
        "rack[1-2]node[3-4]",
        ["rack1node3", "rack1node4", "rack2node3", "rack2node4"],
    ),
    ("a0[1],a00[2]", ["a01", "a002"]),
    ("N1,n1", ["N1", "n1"]),
    ("-n[1]", ["-n1"]),
    ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
    ("a[1]b[2]c[3]d[4-5]", ["a1b2c3d4", "a1b2c3d5"]),
    # In scontrol's order, which is not the order of the numbers.
    ("n[1-2]m[3-4]k[5]", ["n1m3k5", "n2m3k5", "n1m4k5", "n2m4k5"]),
    ("n[1-2][3-4][5-6]j[7]", [f"n{a}{b}{c}j7" for c in "56" for b in "34" for a in "12"]),
    ("[1-2]", ["1", "2"]),
    ("gpu-a100.site-[7]", ["gpu-a100.site-7"]),
    ("n01[1-2]", ["n011", "n012"]),
    ("", []),
    (" ,\t,", []),
    ("n1,", ["n1"]),
    (",n1", ["n1"]),
    ("n1,,n2", ["n1", "n2"]),
    (" n1, n2\tn3 ", ["n1", "n2", "n3"]),
    ("n [1-2] m", ["n", "1", "2", "m"]),
    ("n[999999999999999998-999999999999999999]", [f"n{10**18 - 2}", f"n{10**18 - 1}"]),
    (f"n{2**64}[1]", [f"n{2**64}1"]),
    ("n000018446744073709551614", ["n000018446744073709551614"]),
    ("n\u00e9(1)*;\u0661", ["n\u00e9(1)*;\u0661"]),
    ("(null)", ["(null)"]),
    ("n{1-2}", ["n{1-2}"]),
]


@pytest.mark.parametrize(("expression", "hosts"), EXPANDED)
def test_hostlist_expands(expression, hosts):
    assert expand(expression) == hosts


@pytest.mark.parametrize(
    ("low", "high", "width"),
    [
        (0, 9999, 5),
        (0, 9999, 1),
        (0, 1000, 2),
        (0, 250, 3),
        (1, 65536, 1),
        (98, 301, 2),
        (99, 300, 3),
        (100, 299, 3),
        (100, 299, 18),
        (101, 298, 3),
        (12345, 23456, 5),
        (99_950, 100_250, 5),
    ],
)
def test_hostlist_long_range_has_all_numbers_in_order_and_width(low, high, width):
    expected = [str(number).zfill(width) for number in range(low, high + 1)]
    assert expand(f"[{low:0{width}d}-{high}]") == expected
    assert expand(f"n[{low:0{width}d}-{high}],m") == [*(f"n{number}" for number in expected), "m"]


def test_hostlist_of_several_full_ranges_expands():
    assert len(expand("n[0-40000],m[0-40000]")) == 80_002
    assert len(expand("n[0-40000,0-40000]")) == 80_002
    hosts = expand("a[0-999]b[0-999]")
    assert (len(hosts), hosts[0], hosts[-1]) == (1_000_000, "a0b0", "a999b999")


# Expressions that are refused, and what the message shows of them.
MALFORMED = [
    ("n[1", "'n[1' has a bracket [ without its pair"),
    ("n[1,2", "'n[1,2'"),
    ("m,n[1", "'n[1'"),
    ("n]1", "'n]1'"),
    ("n1]", "'n1]'"),
    ("n[1]]", "'n[1]]'"),
    ("n[1]m]", "'m'"),
    ("n[[1]]", "'n[[1]]'"),
    ("n[1[2]]", "'n[1[2]]'"),
    ("n[1-2,y[3]", "'n[1-2,y[3]'"),
    ("n[]", "'n[]': '' is not a range"),
    ("n[a]", "'n[a]': 'a' is not a range"),
    ("n[1-]", "'1-'"),
    ("n[,1]", "''"),
    ("n[1,]", "''"),
    ("n[1,,2]", "''"),
    ("n[1-2-3]", "'1-2-3'"),
    ("n[1--2]", "'1--2'"),
    ("n[3-1]", "'3-1'"),
    ("n[7,5-3]", "'5-3'"),
    ("ok[1-2],n[-1]", "'n[-1]': '-1'"),
    ("n[1]m[x]", "'x'"),
    ("n[+1]", "'+1'"),
    ("n[0x1]", "'0x1'"),
    ("n[1.5]", "'1.5'"),
    ("n[1_0]", "'1_0'"),
    ("n[ 1-2]", "' 1-2'"),
    ("n[1 -2]", "'1 -2'"),
    ("n[1 2]", "'1 2'"),
    ("n[\u0661-\u0663]", "'\u0661-\u0663'"),  # digits that Slurm does not write
    ("n[1-2]m", "'n[1-2]m' has text after the last bracket: 'm'"),
    ("x,n[1-2].site.org,y", "'.site.org'"),
    ("n[1-2]3", "'3'"),
    ("n1,n[1]m[2]k,x", "'n[1]m[2]k'"),
    ("n[0-65536]", "'0-65536' is not a range of at most 65536 numbers"),
    ("n[1-9999999999999]", "'1-9999999999999'"),
    ("n[18446744073709551615]", "'18446744073709551615'"),
    ("n\n[1]", "'n\\n[1]' has a character that host names cannot have"),
    ("n[1]\n", "a character"),
    ("\x1bn[1]", "a character"),
    ("n1,n\udcff[1]", "a character"),
]
# Names that are refused, and that scontrol takes as they are.
MISNAMED = ["n1\n", "n1\0", "n[1],m\u00a02"]


@pytest.mark.parametrize(
    ("expression", "shown"), [*MALFORMED, *((name, "a character") for name in MISNAMED)]
)
def test_malformed_hostlist_is_refused_with_its_wrong_part(expression, shown):
    with pytest.raises(UsageError) as caught:
        expand(expression)
    assert shown in caught.value.found
    assert (caught.value.exit_code, caught.value.code) == (2, "HT105")


def test_hostlist_leading_zeros_and_suffixes_of_numbers():
    names = ["n18446744073709551614", "n" + "1".zfill(5000), "99999999999999999999-ib"]
    assert expand(",".join(names)) == names


@pytest.mark.parametrize(
    "expression",
    [
        "a[1-999]b[1-999]c[1-999]",
        f"n[0-{'9' * 5000}]",
        f"n[{'0' * 5000}-{'9' * 5000}]",
        "[0-65535]" * 100_000,
        "[]" * 500_000,
        "[" * 1_000_000,
        "]" * 1_000_000,
        "n[" + "1" * 1_000_000,
        "x" * 100_000 + "[1-60000]",
        f"n[{'0' * 100_000}1-60000]",
        ",".join(["n[0-65535]"] * 17),
        "n[" + ",".join(["0-65535"] * 17) + "]",
        "a," * (2**20 + 1),
    ],
    ids=lambda expression: expression[:20],
)
def test_huge_hostlist_is_refused_at_once(expression):
    with pytest.raises(UsageError, match="HT105") as caught:
        expand(expression)
    assert len(str(caught.value)) < 1000


def test_error_of_a_long_hostlist_shows_the_wrong_name():
    with pytest.raises(UsageError, match=r"host list 'n\[7-5\]': '7-5' is not a range"):
        expand("n1," * 1000 + "n[7-5]" + ",n1" * 1000)


@pytest.mark.parametrize(
    ("hosts", "expression"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n011"], "n[09-10,011]"),
        (["n1", "n01", "n001"], "n[1,01,001]"),
        (["n08", "n9", "n10"], "n[08,9-10]"),
        (["n3", "n2", "n2", "n1"], "n[3,2,2,1]"),
        (["n1", "m1", "n2"], "n1,m1,n2"),
        (["n", "n", "n1", "n2"], "n,n,n[1-2]"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r1n[1-2],r2n[1-2]"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
        (["00", "01", "7"], "[00-01,7]"),
        (["n\u0661", "n\u0662"], "n\u0661,n\u0662"),
        (
            ["n01999999999999999999", "n02000000000000000000"],
            "n01999999999999999999,n02000000000000000000",
        ),
    ],
)
def test_hostlist_compresses_names_in_order(hosts, expression):
    assert compress(iter(hosts)) == expression
    assert expand(expression) == hosts


def test_hostlist_command_prints_a_host_per_line(capsys):
    assert main(["hostlist", "n[1-2],m", "y[3]"]) == 0
    assert capsys.readouterr().out == "n1\nn2\nm\ny3\n"


_TEXT = st.text("abz019-._", max_size=4)
# Over a hundred or two, and four terms of two brackets are still fewer hosts than are refused.
_RANGE = st.tuples(st.integers(0, 120), st.integers(0, 7) | st.just(130), st.integers(1, 4))
_BRACKET = st.lists(_RANGE, min_size=1, max_size=3)
_TERM = st.lists(st.tuples(_TEXT, _BRACKET), min_size=1, max_size=2) | st.text(
    "abz019-._", min_size=1, max_size=6
)
_SEPARATOR = st.sampled_from([",", ", ", " ", ",,", "\t"])


def join_terms(terms):
    """Return an expression made of parts, and its host names, expanded one by one."""
    expression, names = "", []
    for term, separator in terms:
        if isinstance(term, str):
            expression, names = expression + term + separator, [*names, term]
            continue
        lists = []
        for text, ranges in term:
            pieces, numbers = [], []
            for low, more, width in ranges:
                start = str(low).zfill(width)
                pieces.append(f"{start}-{low + more}" if more else start)
                numbers += [str(n).rjust(len(start), "0") for n in range(low, low + more + 1)]
            expression += f"{text}[{','.join(pieces)}]"
            lists += [[text], numbers]
        expression += separator
        names += ["".join(name) for name in product(*lists)]
    return expression, names


@given(st.lists(st.tuples(_TERM, _SEPARATOR), max_size=4))
def test_hostlist_of_random_parts_expands_in_order(terms):
    expression, names = join_terms(terms)
    assert expand(expression) == names
    assert expand(compress(names)) == names
