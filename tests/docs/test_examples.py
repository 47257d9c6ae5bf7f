"""The examples that need torchvision, on small sets in the shape of the real ones."""

import json
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import launches
import numpy
import pytest
import ranks
import torch
from checkpoints import load_newest
from PIL import Image
from torchvision import datasets

from hpctrain import Session
from hpctrain.errors import DataError, UsageError
from hpctrain.rundir import RunDirectory

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
def photographs(tmp_path_factory):
    """Images of 3 classes: 2 of 17 to evaluate and 1 of 12 to train by cannot be read."""
    folder = tmp_path_factory.mktemp("photographs")
    draw = numpy.random.default_rng(0)
    for split, count in (("train", 4), ("val", 5)):
        for number in range(3):
            (folder / split / f"photo{number}").mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 100, (80, 100, 3), dtype=numpy.uint8)
                pixels[:, :, number] += 150
                path = folder / split / f"photo{number}" / f"{index}.jpg"
                Image.fromarray(pixels).save(path)
    for number in (1, 2):
        (folder / "val" / f"photo{number}" / "damaged.jpg").write_bytes(b"\xff\xd8 no more")
    (folder / "train" / "photo0" / "1.jpg").write_bytes(b"")
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
        batch = {"data": images.reshape(20, 3072), "labels": labels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(map(str, range(10)))}))


def start(example, run, *options, ranks=SIZE):
    command = ["run", "--nproc-per-node", str(ranks), EXAMPLES / f"{example}.py", "--run-dir", run]
    return launches.start([launches.BIN / "hpctrain", *command, *options], Path.cwd())


def train(example, run, *options, ranks=SIZE):
    """Run an example; return its rows and its output."""
    done = start(example, run, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    return launches.rows(run), done.stderr


@pytest.mark.slow
@pytest.mark.e2e
def test_cifar10_takes_three_steps_on_made_up_images(tmp_path, cifar10, monkeypatch):
    """Check the schedule's values, and one evaluation: no accuracy."""
    write_cifar10(tmp_path / "data")
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda path, md5: True)
    more = ["--lr-steps", "1", "--global-batch", "50", "--max-steps", "3", "--log-every", "1"]
    line = ["cifar10.py", "--data", tmp_path / "data", "--run-dir", tmp_path / "run", *more]
    monkeypatch.setattr("sys.argv", list(map(str, line)))
    cifar10.main()
    *_, row = (row for row in launches.rows(tmp_path / "run") if "eval_loss" in row)
    assert row["step"] == 3
    assert row["eval_loss"] > 0
    for name in ("top1", "top5"):
        assert abs(20 * row[name] - round(20 * row[name])) < 1e-9
    rates = [row["lr"] for row in launches.rows(tmp_path / "run") if "lr" in row]
    assert (rates[0], rates[-1]) == pytest.approx((0.1, 0.02))  # a fifth after two steps


SMALL = (
    *("--recipe", str(RECIPES / "resnet50-modern.toml"), "--model", "squeezenet1_1"),
    *("--max-unreadable", "2", "--train-crop", "64", "--val-crop", "64", "--val-resize", "72"),
    *("--workers", "0", "--lr-warmup-epochs", "0", "--lr", "0.4", "--ema", "0.5"),
    *("--epochs", "2", "--log-every", "1", "--deterministic", "--precision", "fp64"),
    *("--global-batch", "3", "--batch-size", "1"),
)
STEPS = 4  # of an epoch


def train_imagenet(run, folder, *options):
    """Train on this rank."""
    sys.argv = ["imagenet.py", "--run-dir", run, "--data", str(folder), *SMALL, *options]
    launches.example("imagenet").main()


def train_imagenet_and_die(run, folder):
    """Kill this rank in the middle of the second epoch, after a checkpoint of that epoch."""
    step, done = Session.step, 0

    def fatal(self, loss):
        nonlocal done
        done += 1
        if done == STEPS + 3:
            while not RunDirectory(run).checkpoint(STEPS + 2).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, loss)

    Session.step = fatal
    train_imagenet(run, folder, "--checkpoint-every", "1")


def results(run, since=0):
    """Return the metrics of a run by step and name, after a step, and the confusion matrix."""
    kept = ("loss", "lr", "top1", "top5", "eval_loss", "ignored")
    rows = {
        (row["step"], name): row[name]
        for row in launches.rows(run)
        if row["step"] > since
        for name in kept
        if name in row
    }
    return rows, numpy.load(run / "confusion.npy")


def test_imagenet_killed_in_mid_epoch_ends_with_the_bits_of_an_undisturbed_run(
    tmp_path, photographs
):
    """Draw crops, mixup, cutmix, TrivialAugment and erasing; skip unreadable images."""
    killed = ranks.run(3, train_imagenet_and_die, "killed", photographs)
    assert all(isinstance(result, RuntimeError) for result in killed), killed
    ranks.values(ranks.run(3, train_imagenet, "killed", photographs, "--resume"))
    ranks.values(ranks.run(3, train_imagenet, "undisturbed", photographs))
    starts = (tmp_path / "killed" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(start)["step"] for start in starts] == [0, STEPS + 2]
    rows, confusion = results(tmp_path / "killed")
    expected, confusion_expected = results(tmp_path / "undisturbed")
    assert rows == expected
    assert sum(name == "loss" for _, name in rows) == 2 * STEPS
    # Each readable image was evaluated once.
    assert confusion.sum(1).tolist() == [5, 5, 5]
    assert (confusion == confusion_expected).all()
    assert rows[2 * STEPS, "ignored"] == 2
    found, expected = (weights(tmp_path / name) for name in ("killed", "undisturbed"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def weights(run):
    """Return the weights and their averages in the newest checkpoint of a run."""
    _, state = load_newest(RunDirectory(run))
    model, average = state["model"]
    return model | {f"average {name}": value for name, value in average.items()}


@pytest.mark.slow
@pytest.mark.e2e
def test_imagenet_same_losses_on_three_ranks_and_one(tmp_path, photographs):
    many, output = train("imagenet", tmp_path / "many", "--data", photographs, *SMALL)
    train("imagenet", tmp_path / "one", "--data", photographs, *SMALL, ranks=1)
    assert "photo1/damaged.jpg" in output
    rows, confusion = results(tmp_path / "many")
    expected, confusion_expected = results(tmp_path / "one")
    assert rows == pytest.approx(expected, rel=1e-9)
    assert (confusion == confusion_expected).all()
    texts = [(tmp_path / name / "classes.tsv").read_text() for name in ("many", "one")]
    assert texts[0] == texts[1]
    lines = [line.split("\t") for line in texts[0].splitlines()]
    assert lines[0] == ["class", "images", "top1"]
    right = sum(float(top1) * int(count) for _, count, top1 in lines[1:])
    assert right / 15 == pytest.approx(many[-1]["top1"])


@pytest.mark.slow
@pytest.mark.e2e
def test_imagenet_max_unreadable_ends_run_after_first_epoch(tmp_path, photographs):
    """Spread 3 unreadable images over three ranks, so that no rank knows of all."""
    folder = tmp_path / "photos"
    shutil.copytree(photographs, folder)
    for number in (1, 2):
        (folder / "train" / f"photo{number}" / "1.jpg").write_bytes(b"")
    done = start("imagenet", tmp_path / "run", "--data", folder, *SMALL)
    assert done.returncode == 1
    assert f"3 images of {folder}/train cannot be read" in done.stderr
    assert "or:       --max-unreadable 6" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(row["epoch"] == 0 for row in launches.rows(tmp_path / "run"))


def test_imagenet_max_unreadable_counts_images_of_an_epoch(imagenet):
    args = SimpleNamespace(data="photos", max_unreadable=2)
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
    modern = imagenet.parse(["--recipe", str(RECIPES / "resnet50-modern.toml"), "--ema", "0.5"])
    assert (modern.train_crop, modern.mixup, modern.ema, modern.norm_decay) == (
        176,
        0.2,
        0.5,
        False,
    )
    assert modern.workers == "auto"
    plain = imagenet.parse(["--recipe", str(RECIPES / "resnet50-90.toml")])
    assert (plain.lr_schedule, plain.label_smoothing, plain.epochs) == ("step", 0.0, 90)
    with pytest.raises(UsageError, match="--model resnet5") as raised:
        imagenet.build("resnet5", 10)
    assert raised.value.fixes[0].startswith("--model resnet")
    # The real ones take seconds to make.
    monkeypatch.setattr(imagenet.models, "get_model", lambda name, **more: more)
    assert imagenet.build("resnet18", 10) == {"num_classes": 10}
    for name in ("googlenet", "inception_v3"):
        assert imagenet.build(name, 10)["aux_logits"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [("mixup = ", "Invalid value"), ("mixxup = 1", "mixxup: no such option"), (None, "No such")],
)
def test_imagenet_wrong_recipe_is_refused(tmp_path, imagenet, capsys, content, message):
    if content is not None:
        (tmp_path / "wrong.toml").write_text(content)
    with pytest.raises(SystemExit) as raised:
        imagenet.parse(["--recipe", "wrong.toml"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert "--recipe wrong.toml: " in error
    assert message in error


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("step", [0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.01]),
        ("cosine", [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]),
    ],
)
def test_imagenet_schedule_grows_and_falls(imagenet, schedule, rates):
    """Take 8 updates in 4 epochs, of which the first is the warm-up."""
    words = ["--lr-schedule", schedule, "--lr-warmup-epochs", "1", "--lr-step-epochs", "2"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    made = imagenet.make_schedule(imagenet.parse(words), optimizer, epoch=2, epochs=4)
    found = []
    for _ in range(9):
        found += made.get_last_lr()
        optimizer.step()
        made.step()
    assert found == pytest.approx(rates, abs=1e-3)


def test_imagenet_missing_data_shows_expected_layout(tmp_path, imagenet):
    with pytest.raises(UsageError, match="/nothing") as raised:
        imagenet.load(imagenet.parse(["--data", str(tmp_path / "nothing")]))
    assert "/nothing/train/CLASS/*.jpg" in raised.value.expected


def test_imagenet_refuses_splits_with_different_classes(tmp_path, imagenet):
    for place in ("train/cat", "train/dog", "val/cat"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "x.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match="only one split has the class dog"):
        imagenet.load(imagenet.parse(["--data", str(tmp_path)]))


def test_imagenet_reads_the_copy_of_a_job(tmp_path, imagenet, photographs, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_DATA", str(photographs.parent))
    train_set, val_set, names = imagenet.load(imagenet.parse(["--data", photographs.name]))
    assert (len(train_set), len(val_set), len(names)) == (12, 17, 3)


def test_imagenet_synthetic_images(imagenet):
    words = ["--data", "synthetic", "--train-crop", "16", "--val-crop", "24"]
    train_set, val_set, names = imagenet.load(imagenet.parse(words))
    image, target = train_set[0]
    assert (image.dtype, image.shape) == (torch.uint8, (3, 16, 16))
    assert 0 <= target < len(names) == 1000
    assert val_set[0][0].shape == (3, 24, 24)


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
    assert ladder.table(rows).splitlines()[2:] == [
        "| one | 100 | 1.00 | 50.00 % after 10 steps |",
        "| two | 150 | 1.50 | 45.67 % after 2 steps |",
    ]
