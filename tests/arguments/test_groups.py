"""Settings of the backends: one option for each backend, as text or as a dict."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.arguments import Options, options
from hpctrain.arguments.groups import GROUPS
from hpctrain.backends import BACKENDS
from hpctrain.errors import UsageError

TYPED = [
    ("ddp", "static-graph,bucket-mb=30", {"static_graph": True, "bucket_mb": 30}),
    ("ddp", "bucket_mb=0.5, compression=fp16", {"bucket_mb": 0.5, "compression": "fp16"}),
    ("ddp", "gradient-as-bucket-view=no", {"gradient_as_bucket_view": False}),
    ("ddp", "find-unused-parameters=yes", {"find-unused-parameters": True}),
    ("fsdp", "blocks=A+B,hybrid,reshard=no", {"blocks": "A+B", "hybrid": True, "reshard": False}),
    ("horovod", "op=adasum,groups=3", {"op": "adasum", "groups": 3}),
    ("horovod", "op=average,compression=none", {}),
    ("fsdp", "", {}),
]


@pytest.mark.parametrize(("group", "text", "values"), TYPED)
def test_settings_are_the_same_as_typed_text_and_as_keyword(group, text, values):
    typed = Options.of(options().parse_args([f"--{group}", text]), {})
    assert typed == Options.of(None, {group: text}) == Options.of({group: values}, {})
    defaults = Options().settings(group)
    wanted = {name.replace("-", "_"): value for name, value in values.items()}
    assert typed.settings(group) == {**defaults, **wanted}
    assert Options.of(None, dataclasses.asdict(typed)) == typed


@given(st.data())
def test_any_settings_survive_as_text(data):
    group = GROUPS[data.draw(st.sampled_from(sorted(GROUPS)))]
    words = st.from_regex(r"[A-Za-z_]\w*(\+[A-Za-z_]\w*)?", fullmatch=True)
    values = {}
    for name, field in group.fields.items():
        kind = str(field.type)
        strategy = st.sampled_from(field.metadata.get("choices") or [field.default])
        if "action" in field.metadata:
            strategy = st.booleans()
        elif "int" in kind or "float" in kind or field.type in (int, float):
            whole = "int" in kind
            strategy = st.integers(1, 10**6) if whole else st.floats(1e-9, 1e9)
        elif "choices" not in field.metadata:
            strategy = words
        if data.draw(st.booleans()):
            values[name] = data.draw(strategy)
    text = group.text(values)
    assert group.values(text) == {**group.values(None), **values}
    assert group.text(text) == text


@pytest.mark.parametrize(
    ("group", "wrong", "found", "expected", "near"),
    [
        ("ddp", "static-grap", "static-grap", "one of compression, ", "static-graph"),
        ("ddp", "bukcet-mb=25", "bukcet-mb", "find-unused-parameters", "bucket-mb"),
        ("ddp", {"bucket_mb": -1}, "bucket-mb=-1", "a number above 0", ""),
        ("ddp", "bucket-mb=big", "bucket-mb=big", "a number above 0", ""),
        ("ddp", {"bucket_mb": "25"}, "bucket-mb=25", "a number above 0", ""),
        ("ddp", "bucket-mb", "bucket-mb", "a value, as in bucket-mb=X (25)", ""),
        ("ddp", "compression=fp61", "compression=fp61", "none, fp16", "compression=fp16"),
        ("ddp", "static-graph=maybe", "static-graph=maybe", "static-graph=no", ""),
        ("ddp", {"static_graph": "yes"}, "static-graph=yes", "True or False", ""),
        ("ddp", {"static_graph": 1}, "static-graph=1", "True or False", ""),
        ("ddp", "static-graph,static_graph=no", "static-graph twice", "once", ""),
        ("ddp", 25, "25", "a text or a dict", ""),
        ("fsdp", {"blocks": "A,B"}, "blocks=A,B", "+ between them", ""),
        ("fsdp", {"blocks": 3}, "blocks=3", "text", ""),
        ("horovod", {"groups": 0}, "groups=0", "a whole number from 1 on", ""),
    ],
)
def test_wrong_setting_is_rejected_with_the_nearest(group, wrong, found, expected, near, capsys):
    with pytest.raises(UsageError) as caught:
        Options.of(None, {group: wrong})
    assert caught.value.code == "HT501"
    assert caught.value.found == f"--{group} {found}"
    assert expected in caught.value.expected
    assert caught.value.fixes == ((f"--{group} {near}",) if near else ())
    if isinstance(wrong, str):
        with pytest.raises(SystemExit) as left:
            options().parse_args([f"--{group}={wrong}"])
        assert left.value.code == 2
        printed = capsys.readouterr().err
        assert f"argument --{group}: {found}: expected " in printed
        assert expected in printed
        assert f"; did you mean {near}?" in printed or not near


def test_settings_of_another_backend_are_rejected():
    chosen = Options.of(None, {"backend": "horovod", "horovod": {"op": "sum"}})
    assert chosen.of_backend("horovod") == {
        "op": "sum",
        "compression": "none",
        "gradient_predivide_factor": 1.0,
        "groups": None,
        "sparse_as_dense": False,
    }
    assert Options().of_backend("single") == {}
    assert Options().of_backend("ddp") == GROUPS["ddp"].values(None)
    with pytest.raises(UsageError, match="--horovod op=sum with --backend ddp") as raised:
        dataclasses.replace(chosen, backend="ddp").of_backend("ddp")
    assert raised.value.fixes == ("--backend horovod", "remove --horovod")
    assert raised.value.code == "HT503"
    with pytest.raises(UsageError, match="--backend auto, which is ddp here"):
        dataclasses.replace(chosen, backend="auto").of_backend("ddp")


def test_settings_that_a_backend_does_not_need_are_ignored():
    chosen = Options.of(None, {"ddp": "find-unused-parameters", "fsdp": "hybrid"})
    assert chosen.of_backend("single") == {}
    assert chosen.ignored("single") == {"ddp": "find-unused-parameters", "fsdp": "hybrid"}
    chosen = dataclasses.replace(chosen, fsdp=None)
    for backend in ("horovod", "fsdp"):
        assert chosen.of_backend(backend) == GROUPS[backend].values(None)
        assert chosen.ignored(backend) == {"ddp": "find-unused-parameters"}
    assert chosen.ignored("ddp") == {}


def test_every_group_belongs_to_a_backend_and_its_help_lists_all_settings():
    assert set(GROUPS) <= set(BACKENDS)
    for name, group in GROUPS.items():
        assert isinstance(getattr(Options(), name), type(None))
        for setting in group.fields:
            assert setting.replace("_", "-") in group.help
