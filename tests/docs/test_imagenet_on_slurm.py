"""sbatch/imagenet.sh on four hosts, over real photographs in both layouts."""

import json

import launches
import numpy
import pytest
import torch

from hpctrain import checkpoint, data
from hpctrain.rundir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

# 37 images to evaluate: a number that only one rank divides evenly.
CLASSES, LEFT_OUT = 13, 2
SMALL = [
    *("--model", "resnet18", "--train-crop", "64", "--val-crop", "64", "--val-resize", "72"),
    *("--global-batch", "16", "--lr-warmup-epochs", "0", "--epochs", "1", "--log-every", "1"),
    *("--workers", "0", "--deterministic"),
]
HOSTS = ["--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0"]


@pytest.fixture(scope="module")
def imagenet():
    return launches.example("imagenet")


@pytest.fixture
def checkout(tmp_path, lacking):
    """Return a folder that looks like the top of the repository, with photographs in data/."""
    folder = tmp_path / "data" / "imagenet"
    try:
        launches.example("photographs").make(folder, train=3, val=3, classes=CLASSES)
    except FileNotFoundError as error:
        lacking("photographs", str(error))
    for number in range(LEFT_OUT):
        (folder / "val" / f"photo{number:03d}" / "000002.jpg").unlink()
    launches.checkout(tmp_path)
    shards = [launches.BIN / "hpctrain", "shards", "make", folder, tmp_path / "data" / "shards"]
    assert launches.start(shards, tmp_path).returncode == 0
    return tmp_path


def evaluate_by_torch(run, folder, example):
    """Return outputs and targets of the newest checkpoint, by plain torch in one process."""
    checkpoint.export(RunDirectory(run), run / "weights.safetensors")
    from safetensors.torch import load_file

    model = example.build("resnet18", CLASSES)
    model.load_state_dict(load_file(run / "weights.safetensors"))
    source = data.image_source(str(folder), "val")
    images = data.ImageSet(source, data.CenterCrop(64, resize=72))
    batch = next(iter(torch.utils.data.DataLoader(images, len(images))))
    pixels, targets = data.Normalize(example.MEAN, example.STD)(batch)
    with torch.no_grad():
        return model.eval()(pixels), targets


def test_sbatch_imagenet_same_rows_from_folders_and_shards(cluster, checkout, imagenet):
    jobs = [
        cluster.run(
            ["sbatch", "--parsable", *HOSTS, "sbatch/imagenet.sh", *more, *SMALL],
            cwd=checkout,
            env=launches.on_cluster(cluster),
        ).stdout.strip()
        for more in ([], ["--data", "data/shards"])
    ]
    runs = [checkout / "runs" / f"imagenet-{job}" for job in jobs]
    for job in jobs:
        _, code = cluster.ended(job, 240)
        assert code == 0, (checkout / f"imagenet-{job}.log").read_text()
    world = json.loads((runs[0] / "run.json").read_text())["world"]
    assert (world["hosts"], world["launcher"]) == (list(cluster.hosts), "hpctrain")
    # Bit-equal: both have the same bytes of the images.
    own = {"time", "samples_per_second", "data_wait"}
    rows = [
        [{k: v for k, v in row.items() if k not in own} for row in launches.rows(run)]
        for run in runs
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3
    confusion = numpy.load(runs[0] / "confusion.npy")
    assert confusion.sum(1).tolist() == [2, 2, *[3] * (CLASSES - LEFT_OUT)]
    assert (confusion == numpy.load(runs[1] / "confusion.npy")).all()

    outputs, targets = evaluate_by_torch(runs[0], checkout / "data" / "imagenet", imagenet)
    best = outputs.topk(5).indices == targets[:, None]
    row = rows[0][-1]
    assert (row["top1"], row["top5"]) == (best[:, 0].sum().item() / 37, best.sum().item() / 37)
    loss = torch.nn.functional.cross_entropy(outputs.double(), targets).item()
    assert row["eval_loss"] == pytest.approx(loss, rel=1e-5)
    expected = numpy.zeros_like(confusion)
    numpy.add.at(expected, (targets.numpy(), outputs.argmax(1).numpy()), 1)
    assert (confusion == expected).all()
    assert (expected.sum(0) > 0).sum() > 1  # else a model with one answer would pass
