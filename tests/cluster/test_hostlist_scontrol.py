"""Host lists against the real scontrol, which needs no daemon to expand one.

LENIENT has the hosts that scontrol of Slurm 22.05.8 makes of malformed expressions, which hpctrain
refuses.
"""

import os
import re
import shutil
import subprocess

import pytest
import test_hostlist
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.hostlist import compress, expand
from hpctrain.errors import UsageError

pytestmark = pytest.mark.slurm
in_turn = settings(max_examples=3 * settings.default.max_examples, print_blob=False)
REFUSED = None


@pytest.fixture(scope="module")
def scontrol(lacking, tmp_path_factory):
    """Return a function for `scontrol show WHAT EXPRESSION`: lines of output, or REFUSED."""
    if shutil.which("scontrol") is None:
        lacking("slurm", "no scontrol here: type apt-get install slurm-client")
    configuration = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(configuration)}

    def show(what, expression):
        done = subprocess.run(
            ["scontrol", "show", what, "--", expression],
            env=environ,
            capture_output=True,
            timeout=60,
        )
        # Its exit code is always 0, and of several wrong brackets it may report only one.
        errors = done.stderr.decode()
        assert done.returncode == 0, errors
        if "Invalid" in errors or "Too many" in errors:
            assert not done.stdout.strip()
            return REFUSED
        assert not errors
        return [line for line in os.fsdecode(done.stdout).split("\n") if line]

    return show


# Malformed expressions that hpctrain refuses, and the hosts that scontrol makes of them.
LENIENT = {
    # scontrol closes an open bracket after the name.
    "n[1": ["n]"],
    "m,n[1": ["m", "n]"],
    "n[1,2": ["n]", "2"],
    "n[1,2]m[3": ["n[1,2]m]"],
    "n[1-2,y[3]": ["n[1-2,y3"],
    "[1": ["1"],
    "n1]": ["n1]"],
    "n]1": ["n]1"],
    "n]m[1]": ["n]m1"],
    # In a bracket, white space and signs count as digits of the width.
    "n[1-]": ["n1"],
    "n[+1]": ["n01"],
    "n[ 1-2]": ["n01", "n02"],
    "n[1 -2]": ["n01", "n02"],
    "n[1- 2]": ["n1", "n2"],
    "n[1,\t2]": ["n1", "n02"],
    "n[18446744073709551615]": ["n18446744073709551615"],
    # Control characters are part of a name: only comma, space and tab part names.
    "n1\nm2": ["n1", "m2"],  # one name on two lines
    "n\n[1]": ["n", "1"],
    "n1\x01": ["n1\x01"],
    "\x1bn[1]": ["\x1bn1"],
    "n[1]m\x7f[2]": ["n1m\x7f2"],
    "n1,n\udcff[1]": ["n1", "n\udcff1"],
}


@pytest.mark.parametrize(("expression", "hosts"), test_hostlist.EXPANDED)
def test_hostlist_expands_against_scontrol(scontrol, expression, hosts):
    assert scontrol("hostnames", expression) == hosts


@pytest.mark.parametrize("expression", {**dict(test_hostlist.MALFORMED), **LENIENT})
def test_malformed_hostlist_against_scontrol(scontrol, expression):
    assert scontrol("hostnames", expression) == LENIENT.get(expression, REFUSED)
    with pytest.raises(UsageError, match="HT105"):
        expand(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "n[00000-09999]",
        "n[0-65535]",
        "n[98-1001]",
        "rack[00-99]node[00-99]",
        "n[0-40000],m[0-40000]",
        "n[0-40000,0-40000]",
        "r[0-255]n[0-511]",
        "n[" + ",".join(map(str, range(0, 20_000, 2))) + "]",
        "x" * 5000 + "[8-11]y[1-2]",
    ],
    ids=lambda expression: expression[:40],
)
def test_hostlist_large_lists_against_scontrol(scontrol, expression):
    assert expand(expression) == scontrol("hostnames", expression)


_TEXT = st.text("ab019.-_", max_size=4)
_NUMBER = st.from_regex(r"[0-9]{1,4}", fullmatch=True)


def _ranges(most):
    range_ = st.tuples(_NUMBER, st.integers(0, most), st.integers(1, 4)).map(
        lambda parts: f"{parts[0]}-{int(parts[0]) + parts[1]:0{parts[2]}d}"
    )
    return st.lists(_NUMBER | range_, min_size=1, max_size=3).map(",".join)


def _bracketed(most, brackets):
    parts = st.lists(st.tuples(_TEXT, _ranges(most)), min_size=1, max_size=brackets)
    return parts.map(lambda parts: "".join(f"{text}[{inside}]" for text, inside in parts))


_TERMS = st.tuples(
    _bracketed(150, 1) | _bracketed(2, 4) | _TEXT, st.sampled_from([",", ", ", " ", "\t", ",,"])
)


@in_turn
@given(terms=st.lists(_TERMS, max_size=6))
def test_hostlist_random_expressions_against_scontrol(scontrol, terms):
    expression = "".join(term + separator for term, separator in terms)
    assert expand(expression) == scontrol("hostnames", expression)


# Undocumented forms that scontrol accepts in a bracket: a range without an end, and white space.
_TAKEN = re.compile(r"\[[^]]*(-[],]|[ \t])")


@in_turn
@given(text=st.text("n0123[],-\t", max_size=12) | st.text("n01[]", max_size=8))
def test_hostlist_random_text_against_scontrol(scontrol, text):
    expected = scontrol("hostnames", text)
    unpaired = set("[]") & set(re.sub(r"\[[^][]*\]", "", text))
    if expected is REFUSED or unpaired or _TAKEN.search(text):
        with pytest.raises(UsageError, match="HT105"):
            expand(text)
    else:
        assert expand(text) == expected


_NAMES = st.lists(st.from_regex(r"[ab]?[0-9]{0,2}", fullmatch=True).filter(bool), min_size=1)


@in_turn
@given(names=_NAMES | st.lists(st.integers(0, 120).map("n{}".format), min_size=1))
def test_hostlist_compress_against_scontrol(scontrol, names):
    expression = compress(names)
    assert expression == "".join(scontrol("hostlist", ",".join(names)))
    assert scontrol("hostnames", expression) == names
