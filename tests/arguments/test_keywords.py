"""The keywords that editors complete and type checkers know are the options of the tables."""

import inspect
from os import PathLike
from typing import Unpack, get_type_hints

import pytest

import hpctrain
from hpctrain.arguments import Options, keywords
from hpctrain.arguments.groups import GROUPS

TYPES = {"ddp": keywords.DDPKeywords, "fsdp": keywords.FSDPKeywords}
TYPES["horovod"] = keywords.HorovodKeywords


def test_keywords_of_a_session_are_the_options_with_their_types():
    expected = get_type_hints(Options)
    for name in ("run_dir", "resume_from"):
        expected[name] = expected[name] | PathLike[str]
    for name, kind in TYPES.items():
        expected[name] = expected[name] | kind
    found = get_type_hints(keywords.Keywords)
    assert list(found) == list(expected)
    assert found == expected
    assert not keywords.Keywords.__required_keys__
    given = inspect.signature(hpctrain.Session).parameters["keywords"]
    assert given.annotation == Unpack[keywords.Keywords]


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_keywords_of_a_backend_are_its_settings_with_their_types(name):
    assert get_type_hints(TYPES[name]) == get_type_hints(GROUPS[name].table)
    assert not TYPES[name].__required_keys__


def test_types_cover_every_group():
    assert TYPES.keys() == GROUPS.keys()
