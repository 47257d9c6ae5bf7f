"""`hpctrain bench` in one process: options, errors, records, and no files left."""

import json
import math
import os
import signal

import pytest

from hpctrain.cli import main
from hpctrain.tools.bench import allreduce, measure, models, runner, step


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch, tmp_path_factory):
    """Make measurements short, because these tests do not compare speeds."""
    for module in (step, allreduce):
        monkeypatch.setattr(module, "_BLOCK_SECONDS", 0.01)
    # Torch's compiler, which a first step imports, sets this variable and makes the folder.
    compiled = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))


def bench(*words):
    """Run the command; return its exit code, also if it is raised."""
    try:
        return main(["bench", *words])
    except SystemExit as leave:
        return leave.code


def record(tmp_path):
    """Return the saved record, and check that no other file is left."""
    (saved,) = tmp_path.iterdir()
    assert saved.name == "found.json"
    return json.loads(saved.read_text())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", 4),
        ("4B", 4),
        ("64kB", 64_000),
        ("1.5 MB", 1_500_000),
        ("2K", 2000),
        ("1GB", 10**9),
        ("16.1kB", 16_100),
        ("8.7TB", 8_700_000_000_000),
        ("4.004kB", 4004),
    ],
)
def test_bench_sizes_are_powers_of_ten(text, count):
    assert measure.size(text) == count
    if count != 4004:  # the output has three digits
        assert measure.size(measure.spell(count)) == count


def test_bench_size_spelled_in_the_next_unit_when_rounded_up():
    assert [measure.spell(count) for count in (999, 999_499, 999_500, 999_700, 10**6)] == [
        "999 B",
        "999 kB",
        "1 MB",
        "1 MB",
        "1 MB",
    ]


@pytest.mark.parametrize("text", ["", "0", "-4", "1.5B", "1MiB", "many", "4 4"])
def test_bench_refuses_invalid_size(text, capsys):
    with pytest.raises(ValueError, match="such as 4B"):
        measure.size(text)
    assert bench("allreduce", f"--sizes={text}") == 2
    assert "is no list of sizes such as 4B" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["latency"],
        ["step", "--seconds", "0"],
        ["step", "--precision", "O3"],
        ["allreduce", "--sizes", "4,,8"],
        ["input"],
        ["checkpoint"],
    ],
)
def test_bench_wrong_use_exits_with_2(words, capsys):
    assert bench(*words) == 2
    assert "usage: hpctrain bench" in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "busbw"), [(2, 10.0), (4, 15.0), (8, 17.5)])
def test_busbw_is_that_of_nccl_tests(ranks, busbw):
    times = dict.fromkeys(("raw call", "hpctrain"), [1e-4] * 3)
    found = allreduce.evaluate(10**6, times, ranks)["hpctrain"]
    assert (found["algbw"], found["busbw"]) == (pytest.approx(10.0), pytest.approx(busbw))


def test_order_of_arms_is_balanced():
    orders = [measure.order("abc", number) for number in range(6)]
    for one, other in ("ab", "bc", "ac"):
        assert sum(order.index(one) < order.index(other) for order in orders) == 3


def test_ratios_and_differences_compare_values_of_one_round():
    series = {"base": {"ms": [4.0, 1.0, 2.0]}, "other": {"ms": [8.0, 2.0, 4.0]}}
    found = measure.compare(series, "base", ("ratio", "more_ms"))["other"]
    assert found["ms"]["median"] == 4.0
    assert (found["ratio"]["low"], found["ratio"]["high"]) == (2.0, 2.0)
    assert (found["more_ms"]["low"], found["more_ms"]["high"]) == (1.0, 4.0)


@pytest.mark.parametrize("count", range(6, 60))
def test_confidence_interval_of_the_median_covers_95_percent(count):
    def coverage(left_out):
        return 1 - 2 * sum(math.comb(count, below) for below in range(left_out + 1)) / 2**count

    found = measure.summary(range(count))
    assert found["low"] + found["high"] == count - 1
    assert coverage(found["low"]) >= 0.95 > coverage(found["low"] + 2)


@pytest.mark.parametrize("count", range(2, 6))
def test_confidence_interval_of_few_values_is_their_range(count):
    found = measure.summary(range(count))
    assert (found["low"], found["high"]) == (0, count - 1)


def test_bench_allreduce_refuses_one_rank(tmp_path, capsys):
    assert bench("allreduce") == 2
    error = capsys.readouterr().err
    assert "  fix:      srun -n 2 hpctrain bench allreduce\n" in error
    assert "  or:       hpctrain run --nproc-per-node 2 -m hpctrain bench allreduce\n" in error
    assert "hpctrain explain HT903" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["no/such/folder/found.json", "."])
def test_bench_json_refused_before_measuring(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, "measure", lambda *_: pytest.fail("measured"))
    assert bench("step", "--json", path) == 2
    assert "--json FILE\n  more:     hpctrain explain HT904\n" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bench_json_follows_a_link_to_a_file(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/found.json")
    words = ("step", "--seconds", "0.1", "--batch-size", "2", "--json", "link")
    for _ in ("new", "replaced"):
        assert bench(*words) == 0
        assert (tmp_path / "link").is_symlink()
        assert record(tmp_path / "folder")["benchmark"] == "step"


@pytest.mark.parametrize(
    ("model", "suggestion"), [("resnet5", "--model resnet50"), ("smal", "--model resnet50")]
)
def test_bench_unknown_model_suggests_a_known_one(model, suggestion, capsys):
    assert bench("step", "--model", model) == 2
    assert suggestion in capsys.readouterr().err


def test_bench_step_of_one_process(tmp_path, capsys):
    assert bench("step", "--seconds", "0.1", "--batch-size", "2", "--json", "found.json") == 0
    found, output = record(tmp_path), capsys.readouterr().out
    assert (found["benchmark"], found["model"], found["batch_size"]) == ("step", "small", 2)
    assert found["world"]["world_size"] == 1
    assert list(found["results"]) == ["baseline", "hpctrain"]
    for arm in found["results"].values():
        assert arm["images_per_s"] == pytest.approx(2 / arm["ms"]["median"] * 1e3)
        assert "peak_memory" not in arm
    assert found["results"]["baseline"]["ratio"]["median"] == 1.0
    assert found["command"].startswith(("python", "pytest", "hpctrain"))
    assert found["versions"]["torch"]
    assert "hpctrain  " in output
    assert "peak memory" not in output


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_bench_models_have_no_auxiliary_output(name, monkeypatch):
    from torchvision import models as zoo

    # The real models take seconds to make.
    monkeypatch.setattr(zoo, "get_model", lambda name, **more: more)
    assert models.maker(name)()["aux_logits"] is False
    assert "aux_logits" not in models.maker("resnet18")()


@pytest.mark.slow
def test_bench_step_in_half_precision(tmp_path):
    words = ("step", "--seconds", "0.1", "--batch-size", "2", "--precision", "fp16")
    assert bench(*words, "--json", "found.json") == 0
    assert record(tmp_path)["precision"] == "fp16"


def test_bench_on_a_full_file_system_is_one_error(capsys):
    words = ("step", "--seconds", "0.1", "--batch-size", "2", "--json", "/dev/full")
    assert bench(*words) == 2
    assert "--json /dev/full cannot be written: [Errno 28] No space" in capsys.readouterr().err


def send_sigterm(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    return 1.0


def send_sigint(*_):
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0


@pytest.mark.parametrize(("fault", "code"), [(send_sigterm, 75), (send_sigint, 130)])
def test_bench_leaves_no_files_after_a_signal(fault, code, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "timed", fault)
    # Jobs in the background of a shell ignore SIGINT; these tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert bench("step", "--batch-size", "2", "--json", "found.json") == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


def test_bench_title_has_world_device_and_backend():
    record_fields = {
        "benchmark": "step",
        "world": {"world_size": 8, "num_nodes": 2},
        "machine": {"cpu": "some CPU", "cores": 4},
        "device": "NVIDIA H200",
        "backend": "ddp",
        "transport": "nccl",
        "versions": {"torch": "2.15.0"},
        "date": "2026-11-22T00:00:00+00:00",
        "title": "small",
        "results": {"hpctrain": {"ms": {"median": 1, "low": 1, "high": 1}}},
    }
    first, *_ = runner.show(record_fields).splitlines()
    assert first == ("step: 8 ranks on 2 hosts, ddp over nccl, NVIDIA H200, 4 cores of rank 0")
