"""JobSpec: its fields, their formats, and the errors for wrong values."""

import dataclasses

import pytest

from hpctrain.errors import UsageError
from hpctrain.jobs import job_files, units
from hpctrain.jobs.spec import JobSpec, names, unknown


def refusal(**values):
    with pytest.raises(UsageError) as caught:
        JobSpec(**values)
    assert caught.value.code == "HT801"
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("4h", 14400), ("1d12h", 129600), ("90m", 5400), ("90min", 5400), ("45s", 45)),
        *(("90", 5400), ("1:30", 90), ("04:00:00", 14400), ("1-12", 129600), ("1-0:30", 88200)),
        *(("2-01:02:03", 176523), (" 4h ", 14400), ("1h30m", 5400)),
    ],
)
def test_time_limit_formats(text, expected):
    assert units.seconds(text) == expected
    assert units.seconds(units.slurm_time(text)) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "h", "4x", "-4h", "4h:30", "١h", "1e3", "999999999999d", "4 h\n2"]
)
def test_time_limit_refused(text):
    with pytest.raises(ValueError, match="such as 4h"):
        units.seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64G", "64G"), ("64gb", "64G"), ("64GiB", "64G"), ("500M", "500M"), ("0", "0"), ("2T", "2T")],
)
def test_memory_formats(text, expected):
    assert JobSpec(memory=text).memory == expected


def test_job_spec_reports_all_problems_at_once():
    message = refusal(
        name="a/b", nodes=0, time="soon", gpus_per_node="many", requeue="no", venv=None,
        environment={"PATH-": "x"}, extra={"nodes": "3"}, memory="much", container_runtime="docker",
    )  # fmt: skip
    assert message.startswith("invalid values in the job (10):")
    for name in (
        *("name", "nodes", "time", "gpus_per_node", "requeue", "venv", "environment", "extra"),
        *("memory", "container_runtime"),
    ):
        assert f"\n  {name} = " in message, name
    assert "no nodes: that is nodes" in message


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"array": "0-5", "sweep": {"lr": [1]}}, "array and sweep"),
        ({"venv": "a", "conda": "b"}, "venv and conda"),
        ({"throttle": 2}, "throttle without array or sweep"),
        ({"max_restarts": 2, "requeue": False}, "max_restarts without requeue"),
        ({"gpus_per_node": 4, "tasks_per_node": 2}, "tasks_per_node = 2 with 4 GPUs"),
        ({"launcher": "torchrun"}, "one of hpctrain, srun, none"),
        ({"elastic": True, "launcher": "srun"}, "elastic with launcher = srun"),
        ({"container": "a.sif", "launcher": "none"}, "container with launcher = none"),
        ({"container": "a.sif", "launcher": "srun"}, "container with launcher = srun"),
        ({"container": "a.sif", "elastic": True}, "container and elastic"),
        ({"stage_code": ".", "launcher": "srun"}, "with another launcher than hpctrain"),
        (
            {"stage_data": "x", "container": "a#b", "container_runtime": "pyxis"},
            "with another launcher than hpctrain",
        ),
        ({"time": "1m", "signal_time": 60}, "signal_time = 60 and time = 00:01:00"),
        ({"nodes": True}, "nodes = True"),
        ({"nodes": "٣"}, "nodes = '٣'"),
        ({"command": 'python "x'}, "its quotes closed"),
        ({"command": ["", "x"]}, "a program first"),
        ({"command": ["-x"]}, "a program first"),
        ({"container": "a.sif", "venv": ".venv"}, "container and venv"),
        ({"stage_environment": "env.zip"}, "a tar archive"),
        ({"stage_data": "../"}, "a folder by its name"),
        ({"exclude": "a\nb"}, "exclude"),
        ({"partition": "a" * 1001}, "at most 1000 bytes"),
        ({"environment": {"SLURM_PROCID": "1"}}, "'SLURM_PROCID'"),
        ({"environment": {"A": "x\0"}}, "text without NUL"),
        ({"memory": "64"}, "a size with its unit"),
        ({"output": "~/logs/%j"}, "without ~ and $"),
        ({"output": "$HOME/%j"}, "without ~ and $"),
        ({"extra": {"no-req": True}}, "no no-req: that is requeue"),
        ({"extra": {"gpus": 4}}, "no gpus: that is gpus_per_node"),
        ({"sweep": {"lr": []}}, "a list of values"),
        ({"sweep": ["ab"]}, "a list of tables"),
        ({"sweep": [["ab"]]}, "a list of tables"),
        ({"sweep": [1]}, "a list of tables"),
        ({"environment": {"A": True}}, "text without NUL in A"),
        ({"extra": {"licenses": ["a", "b"]}}, "text without NUL"),
        ({"sweep": {"a": list(range(200)), "b": list(range(200))}}, "at most 10000 settings"),
        ({"sweep": [{"lr; rm": 1}]}, "names of options"),
    ],
)
def test_job_spec_refuses_invalid_values(values, found):
    assert found in refusal(**values)


def test_job_spec_defaults_follow_from_command_and_gpus():
    spec = JobSpec(command="python -u src/train.py --lr 0.1", gpus_per_node="a100:4", nodes="2")
    assert (spec.title, spec.gpus, spec.tasks, spec.nodes) == ("train", 4, 4, 2)
    assert JobSpec(command="python -m package.train").title == "train"
    assert JobSpec(command="hostname").title == "hostname"
    one = JobSpec(command="x --backend dataparallel", gpus_per_node=4, tasks_per_node=1)
    assert one.tasks == 1


def test_sweep_is_grid_or_list():
    grid = JobSpec(command="x", sweep={"lr": [0.1, 0.2], "seed": [1, 2, 3]}, throttle=2)
    assert grid.indices == "0-5"
    assert grid.sweep[3] == (("lr", "0.2"), ("seed", "1"))
    assert JobSpec(sweep=[{"lr": 0.1}, {"lr": "-1", "wd": ""}]).sweep[1] == (
        ("lr", "-1"),
        ("wd", ""),
    )


def test_job_spec_unknown_fields_suggest_names():
    given = ["node", "gpus-per-node", "mem", "env", "nodes", "x"]
    found = dict(unknown(given))
    assert [name for name in given if repr(name) not in found] == ["nodes"]
    assert found["'node'"] == "nodes"
    assert found["'gpus-per-node'"] == "gpus_per_node"
    assert found["'mem'"] == "memory"
    assert found["'env'"] == "environment"
    assert found["'x'"] == f"another name; all names: {', '.join(names())}"


def test_signal_time_of_short_job_is_half_its_time():
    assert JobSpec().signal_seconds == JobSpec(time="4h").signal_seconds == 120
    assert JobSpec(time="2m").signal_seconds == 60
    assert JobSpec(time="2m", signal_time=0).signal_seconds == 0


def test_job_spec_is_frozen():
    spec = JobSpec(command="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.nodes = 2
    assert dataclasses.replace(spec, nodes=2).nodes == 2


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff", b"nodes = ", b"[" * 100_000, b"x = 1", "folder"],
)
def test_job_toml_invalid_file_is_refused(tmp_path, content):
    path = tmp_path / "job.toml"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    if content == b"":
        assert job_files.read(path) == {}
        return
    with pytest.raises(UsageError) as caught:
        job_files.read(path)
    assert str(path) in str(caught.value)


def test_job_toml_may_have_sbatchs_names_of_fields(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('ntasks_per_node = 2\nmem = "4G"\njob-name = "a"\n[[part]]\nmem = "1G"\n')
    spec = JobSpec(**job_files.read(path))
    assert (spec.tasks_per_node, spec.memory, spec.name) == (2, "4G", "a")
    assert spec.parts[1].memory == "1G"
    for content, expected in (
        ("tasks_per_node = 2\nntasks_per_node = 2", "tasks_per_node, once"),
        ("ntasks = 2", "nodes and tasks_per_node"),
        ("gpus = 2", "gpus_per_node"),
        ('nodelist = "node1"', 'nodelist = "…" under [extra]'),
        ('mail_user = "a"', 'mail-user = "…" under [extra]'),
    ):
        path.write_text(content)
        with pytest.raises(UsageError) as caught:
            job_files.read(path)
        assert f"expected: {expected}" in str(caught.value)


def test_options_replace_values_of_job_toml():
    file = {"nodes": 2, "venv": ".venv", "sweep": {"lr": [1]}, "environment": {"A": "1", "B": "1"}}
    options = {"nodes": "3", "conda": "torch", "array": "0-3", "environment": {"B": "2"}}
    assert job_files.merged(file, options) == {
        "nodes": "3", "conda": "torch", "array": "0-3", "environment": {"A": "1", "B": "2"}
    }  # fmt: skip
