"""The examples that need torchvision, on small sets in the shape of the real ones."""

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import launches
import numpy
import pytest
import torch

from hpctrain.errors import DataError, UsageError

SIZE = 3  # ranks
EXAMPLES = launches.TOP / "examples"
RECIPES = EXAMPLES / "recipes"


@pytest.fixture(scope="module")
def cifar10():
    return launches.example("cifar10")


@pytest.fixture(scope="module")
def imagenet():
    return launches.example("imagenet")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory, lacking):
    """Photographs of 3 classes: 2 of 17 to evaluate and 1 of 12 to train by cannot be decoded."""
    folder = tmp_path_factory.mktemp("photographs")
    try:
        launches.example("photographs").make(folder, train=4, val=5, classes=3)
    except FileNotFoundError as error:
        lacking("photographs", str(error))
    for number in (1, 2):
        (folder / "val" / f"photo{number:03d}" / "damaged.jpg").write_bytes(b"\xff\xd8 no more")
    (folder / "train" / "photo000" / "000001.jpg").write_bytes(b"")
    return folder


def write_cifar10(folder):
    """Write six batches in CIFAR-10's format, with a bright row whose place is the class."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = draw.integers(0, 10, 20).tolist()
        images = draw.integers(0, 100, (20, 3, 32, 32), dtype=numpy.uint8)
        images[numpy.arange(20), :, 3 * numpy.array(labels)] += 150
        batch = {b"batch_label": b"one", b"data": images.reshape(20, 3072), b"labels": labels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def start(example, run, *options, ranks=SIZE):
    command = ["run", "--nproc-per-node", str(ranks), EXAMPLES / f"{example}.py", "--run-dir", run]
    return launches.start([launches.BIN / "hpctrain", *command, *options], Path.cwd())


def train(example, run, *options, ranks=SIZE):
    """Run an example; return its rows and its output."""
    done = start(example, run, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    return launches.rows(run), done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("example", ["cifar10", pytest.param("imagenet", marks=pytest.mark.slow)])
def test_missing_torchvision_is_one_error_with_the_line_to_type(example, tmp_path):
    absent = tmp_path / "torchvision.py"
    absent.write_text("raise ModuleNotFoundError(\"No module named 'torchvision'\")\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [launches.BIN / "hpctrain", "run", "--nproc-per-node", str(SIZE)]
    done = launches.start([*command, EXAMPLES / f"{example}.py"], tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.count("hpctrain: error: torchvision cannot be imported") == 1
    assert f"fix:      {launches.PYTHON} -m pip install 'hpctrain[vision]'\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.e2e
def test_cifar10_takes_three_steps_on_made_up_images(tmp_path, cifar10, monkeypatch):
    """Check the schedule's values, and one evaluation: no accuracy."""
    write_cifar10(tmp_path / "data")
    more = ["--lr-steps", "1", "--global-batch", "50", "--max-steps", "3", "--log-every", "1"]
    line = ["cifar10.py", "--data", tmp_path / "data", "--run-dir", tmp_path / "run", *more]
    monkeypatch.setattr("sys.argv", list(map(str, line)))
    cifar10.main()
    (row,) = (row for row in launches.rows(tmp_path / "run") if "eval_loss" in row)
    assert row["step"] == 3
    assert row["eval_loss"] > 0
    for name in ("top1", "top5"):
        assert abs(20 * row[name] - round(20 * row[name])) < 1e-9
    rates = [row["lr"] for row in launches.rows(tmp_path / "run") if "lr" in row]
    assert (rates[0], rates[-1]) == pytest.approx((0.1, 0.02))  # a fifth after two steps


SMALL = (
    *(
        "--recipe",
        RECIPES / "resnet50-modern.toml",
        "--model",
        "squeezenet1_1",
        "--max-corrupt",
        "2",
    ),
    *("--train-crop", "64", "--val-crop", "64", "--val-resize", "72", "--workers", "0"),
    *("--lr-scaling", "none", "--lr-warmup-epochs", "0", "--lr", "0.01", "--ema", "0.5"),
    *("--epochs", "2", "--log-every", "1", "--deterministic", "--precision", "fp64"),
    *("--global-batch", "6", "--batch-size", "2"),
)


@pytest.mark.slow
@pytest.mark.e2e
def test_imagenet_same_losses_on_three_ranks_and_one_from_shards_and_folders(tmp_path, photographs):
    """Draw mixup, cutmix, TrivialAugment and erasing; count unreadable images nowhere."""
    shards = tmp_path / "shards"
    done = launches.start([launches.BIN / "hpctrain", "shards", "make", photographs, shards], ".")
    assert done.returncode == 0, done.stderr
    many, output = train("imagenet", tmp_path / "many", "--data", shards, *SMALL)
    one, _ = train("imagenet", tmp_path / "one", "--data", photographs, *SMALL, ranks=1)
    assert "photo001/damaged.jpg" in output
    assert len(many) == len(one) == 6
    for row, expected in zip(many, one, strict=True):
        for name in {"loss", "lr", "top1", "top5", "eval_loss", "ignored"} & row.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-9), (name, row, expected)
    assert {row["ignored"] for row in many if "ignored" in row} == {2}
    first, second = (numpy.load(tmp_path / name / "confusion.npy") for name in ("many", "one"))
    assert first.sum(1).tolist() == [5, 5, 5]
    assert (first == second).all()
    texts = [(tmp_path / name / "classes.tsv").read_text() for name in ("many", "one")]
    assert texts[0] == texts[1]
    lines = [line.split("\t") for line in texts[0].splitlines()]
    assert lines[0] == ["class", "images", "top1"]
    right = sum(float(top1) * int(count) for _, count, top1 in lines[1:])
    assert right / 15 == pytest.approx(many[-1]["top1"])


@pytest.mark.slow
@pytest.mark.e2e
def test_imagenet_max_corrupt_ends_run_after_first_epoch(tmp_path, photographs):
    """Spread 3 unreadable images over three ranks, so that no rank knows of all."""
    folder = tmp_path / "photos"
    shutil.copytree(photographs, folder)
    for number in (1, 2):
        (folder / "train" / f"photo{number:03d}" / "000001.jpg").write_bytes(b"")
    done = start("imagenet", tmp_path / "run", "--data", folder, *SMALL)
    assert done.returncode == 1
    assert f"3 images of {folder}/train cannot be decoded" in done.stderr
    assert "or:       --max-corrupt 6" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(row["epoch"] == 0 for row in launches.rows(tmp_path / "run"))


def test_imagenet_max_corrupt_counts_images_of_an_epoch(imagenet):
    args = SimpleNamespace(data="photos", max_corrupt=2)
    imagenet.check(args, "train", 2)
    with pytest.raises(DataError, match="3 images of photos/train"):
        imagenet.check(args, "train", 3)


def test_imagenet_writes_accuracy_of_classes_with_any_name(tmp_path, imagenet):
    names = [os.fsdecode(b"caf\xe9"), "café", "a\tb\nc"]
    counts = torch.eye(3, dtype=torch.int64)
    result = SimpleNamespace(confusion=counts, per_class=torch.ones(3))
    for _ in range(2):
        imagenet.keep(tmp_path, result, names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classes.tsv", "confusion.npy"]
    lines = (tmp_path / "classes.tsv").read_bytes().split(b"\n")
    assert [line.split(b"\t")[0] for line in lines[1:-1]] == [
        b"caf\xe9",
        "café".encode(),
        rb"a\tb\nc",
    ]
    assert (numpy.load(tmp_path / "confusion.npy") == numpy.eye(3)).all()


def test_imagenet_recipes_and_models(imagenet, monkeypatch):
    modern = imagenet.options().parse_args(["--recipe", str(RECIPES / "resnet50-modern.toml")])
    assert (modern.train_crop, modern.mixup, modern.ema) == (176, 0.2, 0.99996585)
    assert modern.workers == "auto"
    plain = imagenet.options().parse_args(["--recipe", str(RECIPES / "resnet50-90.toml")])
    assert (plain.lr_schedule, plain.label_smoothing, plain.epochs) == ("step", 0.0, 90)
    with pytest.raises(UsageError, match="--model resnet5") as raised:
        imagenet.build("resnet5", 10)
    assert raised.value.fixes[0].startswith("--model resnet")
    # The real ones take seconds to make.
    monkeypatch.setattr(imagenet.models, "get_model", lambda name, **more: more)
    assert imagenet.build("resnet18", 10) == {"num_classes": 10}
    for name in ("googlenet", "inception_v3"):
        assert imagenet.build(name, 10)["aux_logits"] is False


def test_imagenet_missing_data_shows_expected_layout(tmp_path, imagenet):
    args = imagenet.options().parse_args(["--data", str(tmp_path / "nothing")])
    with pytest.raises(UsageError, match="/nothing") as raised:
        imagenet.load(args)
    assert "PATH/train/CLASS/*.jpg" in raised.value.expected


def test_imagenet_refuses_single_class(tmp_path, imagenet):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "x.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match="has one class, cat"):
        imagenet.load(imagenet.options().parse_args(["--data", str(tmp_path)]))


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("canary",)


def batch(protocol=4):
    images = numpy.zeros((2, 3072), numpy.uint8)
    return pickle.dumps({b"data": images, b"labels": [1, 2]}, protocol)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "Ran out of input"),
        (batch()[:-200], "pickle data was truncated"),
        (b"<html>Not Found</html>", "invalid load key, '<'"),
        (pickle.dumps({b"data": Hostile(), b"labels": []}), "posix.mkdir, which is no array"),
        (pickle.dumps([1]), "list indices"),
        (pickle.dumps({b"data": numpy.zeros((2, 3072)), b"labels": [1, 2]}), "torch.float64"),
        (
            pickle.dumps({b"data": numpy.zeros((2, 3072), "u1"), b"labels": [1]}),
            "torch.Size([1]) labels",
        ),
        (pickle.dumps({b"data": numpy.zeros((2, 30), "u1"), b"labels": [1, 2]}), "shape"),
    ],
)
def test_cifar10_refuses_damaged_or_hostile_files(tmp_path, cifar10, content, message):
    path = tmp_path / "data_batch_1"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        cifar10.read(path)
    assert str(path) in raised.value.found
    assert message in raised.value.found
    assert "cifar-10-batches-py" in raised.value.expected
    assert not Path("canary").exists()


def test_cifar10_reads_pickles_of_python_2(tmp_path, cifar10):
    """Read pickles with the older name of NumPy's module."""
    made = batch(2)
    assert b"numpy._core" in made
    (tmp_path / "batch").write_bytes(made.replace(b"numpy._core", b"numpy.core"))
    images, targets = cifar10.read(tmp_path / "batch")
    assert (images.shape, targets.tolist()) == ((2, 3, 32, 32), [1, 2])


@pytest.mark.slow
@pytest.mark.e2e
def test_ladder_example_measures_each_rung(tmp_path):
    more = ("--data", "digits", "--steps", "10", "--ranks", str(SIZE), "--global-batch", "48")
    script = [launches.PYTHON, EXAMPLES / "ladder.py", *more, "--json", tmp_path / "ladder.json"]
    done = launches.start(script, tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "ladder.json").read_text())
    assert f"torch {torch.__version__}" in made["about"]
    assert [(row["rung"], row["steps"]) for row in made["rows"]] == [
        ("one process", 10),
        ("ddp, 3 ranks", 10),
        ("ddp, 3 ranks, bf16", 1),
    ]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 4
    for row in made["rows"]:
        assert abs(360 * row["top1"] - round(360 * row["top1"])) < 1e-9


def test_ladder_example_rungs_and_table():
    ladder = launches.example("ladder")
    made = ladder.rungs(ranks=4, gpus=4)
    assert [processes for processes, _ in made.values()] == [1, 1, 4, 4]
    assert made["DataParallel, 4 GPUs"][1][:2] == ["--backend", "dataparallel"]
    assert made["ddp, 4 ranks, bf16"][1] == ["--backend", "ddp", "--precision", "bf16"]
    rows = [
        {"rung": "one", "images_per_second": 100.0, "top1": 0.5, "steps": 10},
        {"rung": "two", "images_per_second": 150.0, "top1": 0.4567, "steps": 2},
    ]
    assert ladder.table(rows, 3000).splitlines()[2:] == [
        "| one | 30.0 s | 100 | 1.00 | 50.00 % after 10 steps |",
        "| two | 20.0 s | 150 | 1.50 | 45.67 % after 2 steps |",
    ]
