"""Consistency check: harmful differences between ranks are refused, and no secret is shown."""

import copy
import importlib
import json
import os
import resource
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.arguments import Options
from hpctrain.errors import ContradictionError, UsageError
from hpctrain.process import file_limit
from hpctrain.rendezvous import consistency

HOSTS = ("node1", "node1", "node2", "node2")


@pytest.fixture
def equal_entries():
    """Return the entries of four ranks that differ only in their GPUs."""
    entry = consistency.entry(torch.device("cpu"), Options().deciding())
    entries = [copy.deepcopy(entry) for _ in HOSTS]
    for rank, entry in enumerate(entries):
        entry |= {"gpu": f"GPU-{rank}", "gpu_name": "H200"}
    return entries


def change(entry, path, value):
    *outer, last = path.split("/")
    for name in outer:
        entry = entry[name]
    entry[last] = value


def test_equal_ranks_pass_the_consistency_check(equal_entries, caplog):
    assert not consistency.differences(equal_entries, HOSTS)
    consistency.check(equal_entries, HOSTS)
    assert not caplog.records


@pytest.mark.parametrize(
    ("code", "path", "value", "message"),
    [
        ("HT113", "gpu", "GPU-1", "one GPU (GPU-1) is shared by ranks 1 and 2 on node1 and node2"),
        ("HT116", "gpu", None, "torch sees a GPU at 3 of 4 ranks, but none at rank 2 on node2"),
        (
            "HT208",
            "versions/torch",
            "2.6.0",
            "at ranks 0, 1 and 3 on node1 and node2; 2.6.0 at rank 2 on node2",
        ),
        ("HT208", "versions/cuda", "11.8", "11.8 at rank 2 on node2"),
        ("HT208", "versions/system", "Darwin", "operating systems differ: Linux at ranks"),
        (
            "HT208",
            "versions/nccl",
            "2.1.1",
            "nccl none at ranks 0, 1 and 3 on node1 and node2; 2.1.1 at rank 2",
        ),
        ("HT208", "versions/hpctrain", "9", "9 at rank 2 on node2"),
        ("HT208", "versions/horovod", "0.27.0", "0.27.0 at rank 2 on node2"),
        (
            "HT209",
            "settings/--seed",
            1,
            "--seed 0 at ranks 0, 1 and 3 on node1 and node2; 1 at rank 2 on node2",
        ),
        (
            "HT209",
            "settings/--max-nonfinite",
            5,
            "--max-nonfinite 25 at ranks 0, 1 and 3 on node1 and node2; 5 at rank 2",
        ),
        ("HT209", "settings/--precision", "bf16", "--precision auto at"),
        ("HT209", "command", ["other.py"], "different scripts: "),
    ],
)
def test_difference_that_breaks_training_is_refused_with_the_ranks(
    equal_entries, code, path, value, message
):
    change(equal_entries[2], path, value)
    with pytest.raises(ContradictionError) as caught:
        consistency.check(equal_entries, HOSTS)
    assert message in caught.value.found
    assert caught.value.code == code
    assert caught.value.expected
    assert caught.value.fixes


def test_horovod_version_is_compared_over_horovod_alone(monkeypatch):
    monkeypatch.setattr(consistency.metadata, "version", lambda _: "0.27.0")
    versions = [
        consistency.entry(torch.device("cpu"), {"--backend": name})["versions"]["horovod"]
        for name in ("horovod", "ddp")
    ]
    assert versions == ["0.27.0", None]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("versions/python", "3.12.1", "3.12.1 at rank 2 on node2"),
        ("gpu_name", "A100", "GPU models differ: H200 at ranks 0, 1 and 3"),
        (
            "code",
            {"a.py": "2"},
            "a.py differs: version 1 at ranks 0, 1 and 3 on node1 and node2; 2 at rank 2",
        ),
        ("network", {"NCCL_DEBUG": "INFO"}, "NCCL's and gloo's variables differ: {} at ranks"),
        ("command", ["train.py", "--lr", "--lr=1234"], "different commands: --lr is present only"),
    ],
)
def test_difference_that_may_be_intended_is_a_warning(equal_entries, path, value, message):
    for entry in equal_entries:
        entry |= {"command": ["train.py"], "code": {"a.py": "1"}}
    change(equal_entries[2], path, value)
    (difference,) = consistency.differences(equal_entries, HOSTS)
    assert not difference.wrong
    assert message in difference.error.found
    assert difference.error.fixes


@pytest.mark.parametrize(
    ("saying", "value", "wrong"),
    [((0, 1, 2, 3), "1", False), ((1, 2), "1", True), ((0, 1, 2, 3), "0", True), ((), "", True)],
)
def test_shared_gpu_is_accepted_only_where_all_ranks_allow_it(equal_entries, saying, value, wrong):
    for rank in saying:
        equal_entries[rank]["network"] = {"NCCL_MULTI_RANK_GPU_ENABLE": value}
    change(equal_entries[2], "gpu", "GPU-1")
    found = {one.subject: one for one in consistency.differences(equal_entries, HOSTS)}
    assert (
        found["GPU"].error.found == "one GPU (GPU-1) is shared by ranks 1 and 2 on node1 and node2"
    )
    assert found["GPU"].wrong == wrong


def test_network_interfaces_may_differ_between_hosts(equal_entries):
    for rank, entry in enumerate(equal_entries):
        entry["network"] = {"GLOO_SOCKET_IFNAME": f"eth{rank}", "NCCL_SOCKET_IFNAME": f"ib{rank}"}
    assert not consistency.differences(equal_entries, HOSTS)


def test_errors_come_before_warnings(equal_entries):
    change(equal_entries[1], "versions/python", "3.12.1")
    change(equal_entries[2], "settings/--seed", 7)
    assert [one.subject for one in consistency.differences(equal_entries, HOSTS)] == [
        "--seed",
        "python",
    ]


def test_message_of_many_ranks_is_short(equal_entries):
    entries = [{**copy.deepcopy(equal_entries[0]), "gpu": None} for _ in range(1000)]
    for entry in entries[::2]:
        entry["versions"]["torch"] = "2.6.0"
    (difference,) = consistency.differences(entries, [f"node{rank // 4}" for rank in range(1000)])
    assert "(500 ranks)" in difference.error.found
    assert len(difference.error.found) < 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/home/ada/train.py"], ["train.py"]),
        (["train.py", "--local_rank=3", "--local-rank", "2", "-v"], ["train.py", "-v"]),
        (["train.py", os.fsdecode(b"--name=\xff")], ["train.py", "--name=a8100ae6"]),
        ([], [""]),
        ([""], [""]),
    ],
)
def test_command_is_compared_without_folder_and_local_rank(arguments, message):
    assert consistency._command(arguments) == message


def test_differing_option_is_named_without_its_value(equal_entries):
    commands = [["train.py", "--wandb-key", "s3cret", "--lr", "0.1"], ["train.py", "--lr", "0.1"]]
    equal_entries[0]["command"], *others = [
        consistency._command(commands[rank == 2]) for rank in range(4)
    ]
    for entry, command in zip(equal_entries[1:], others, strict=True):
        entry["command"] = command
    (difference,) = consistency.differences(equal_entries, HOSTS)
    found = difference.error.found
    assert "--wandb-key" in found
    assert "s3cret" not in found
    assert "ranks 0, 1 and 3 on node1 and node2, and rank 2 on node2, were" in found


@given(
    st.from_regex(r"[A-Za-z0-9]{8,20}", fullmatch=True),
    st.sampled_from(["--key={}", "--key {}", "-k{}", "-k {}", "{}", "-0{}", "--key=a={}", "={}"]),
)
def test_command_never_shows_an_option_value(value, form):
    command = json.dumps(consistency._command(["train.py", *form.format(value).split()]))
    assert value not in command


def test_environment_never_shows_a_secret(monkeypatch):
    secret = "s3cret-in-the-environment"
    names = (
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "HPCTRAIN_SECRET",
        "NCC",
        "XNCCL_A",
    )
    for name in names:
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    entry = consistency.entry(torch.device("cpu"), {})
    assert secret not in json.dumps(entry)
    assert entry["network"]["NCCL_DEBUG"] == "WARN"


def test_code_version_covers_the_script_and_its_local_imports(tmp_path, monkeypatch):
    for name in ("train.py", "model.py", "never_imported.py"):
        (tmp_path / name).write_text(f"x = '{name}'\n")
    main, script = sys.modules["__main__"], tmp_path / "train.py"
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setitem(sys.modules, "model", type(sys)("model"))
    sys.modules["model"].__file__ = str(tmp_path / "model.py")
    (tmp_path / "nets").mkdir()  # a package without __init__.py
    (tmp_path / "nets" / "unet.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nets", "nets.unet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("nets.unet")
    before = consistency._code()
    assert set(before) == {"train.py", "model.py", "nets/unet.py"}
    (tmp_path / "model.py").write_text("x = 2\n")
    assert consistency._code()["model.py"] != before["model.py"]
    assert consistency._code()["train.py"] == before["train.py"]
    (tmp_path / "model.py").unlink()
    assert set(consistency._code()) == {"train.py", "nets/unet.py"}
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert consistency._code() == {}


def test_module_imported_by_some_ranks_only_is_not_a_difference(equal_entries):
    for entry in equal_entries:
        entry["code"] = {"train.py": "1"}
    equal_entries[0]["code"]["tracker.py"] = "2"
    assert not consistency.differences(equal_entries, HOSTS)


def test_open_files_limit_grows_with_the_world_and_is_restored(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 3000:
        pytest.fail(f"the hard limit on open files is {before[1]} here: ulimit -Hn 4096")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        file_limit.make_room(16)()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        put_back = file_limit.make_room(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2000
        put_back()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
        with pytest.raises(UsageError, match="at most 256 open files") as caught:
            file_limit.make_room(1000)
        assert caught.value.code == "HT117"
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
