"""The examples that need torchvision, on small sets in the shape of the real ones."""

import json
import pickle
from pathlib import Path

import launches
import pytest

SIZE = 3  # ranks


def cifar10(folder):
    """Six batches as the original files have them, with a bright row whose place is the class."""
    import numpy

    folder = folder / "cifar-10-batches-py"
    folder.mkdir()
    draw = numpy.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = draw.integers(0, 10, 20).tolist()
        images = draw.integers(0, 100, (20, 3, 32, 32), dtype=numpy.uint8)
        images[numpy.arange(20), :, 3 * numpy.array(labels)] += 150
        batch = {b"data": images.reshape(20, 3072), b"labels": labels}
        (folder / name).write_bytes(pickle.dumps(batch))


def imagenet(folder):
    """Three classes of JPEG files, of unlike sizes and numbers."""
    from PIL import Image

    for split, count in (("train", 8), ("val", 5)):
        for label, colour in enumerate(("red", "green", "blue")):
            place = folder / split / f"n0000000{label}"
            place.mkdir(parents=True)
            for number in range(count + label):
                size = (250 + 10 * number, 180 + 20 * label)
                Image.new("RGB", size, colour).save(place / f"{number}.jpg")


@pytest.mark.parametrize(
    ("example", "make", "options", "samples"),
    [
        ("cifar10", cifar10, ("--batch-size", "4"), 20),
        ("imagenet", imagenet, ("--model", "squeezenet1_1", "--batch-size", "2"), 18),
    ],
)
def test_it_trains_and_evaluates_every_sample(tmp_path, example, make, options, samples):
    data = tmp_path / "data"
    data.mkdir()
    make(data)
    more = (*options, "--data", data, "--max-steps", "2", "--lr", "0.01", "--run", tmp_path / "run")
    command = ["run", "--nproc-per-node", str(SIZE), launches.TOP / "examples" / f"{example}.py"]
    done = launches.start([launches.BIN / "hpctrain", *command, *more], tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("done", 2)
    top1 = summary["metrics"]["top1"]
    assert abs(top1 * samples - round(top1 * samples)) < 1e-9


@pytest.mark.parametrize("example", ["cifar10", "imagenet"])
def test_what_is_not_there_is_said_with_the_layout(tmp_path, example):
    script = Path(launches.TOP, "examples", f"{example}.py")
    done = launches.start([launches.PYTHON, script, "--data", tmp_path / "nothing"], tmp_path)
    assert done.returncode == 1
    assert "/nothing" in done.stderr
    assert "expected: " in done.stderr
    assert "Traceback" not in done.stderr
