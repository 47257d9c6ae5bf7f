"""sbatch/imagenet.sh on four hosts, over real photographs."""

import json

import launches
import numpy
import pytest
import torch

from hpctrain import checkpoint
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
# The trial in the first lines of the script, with a smaller image.
TRIAL = [
    *("--nodes=1", "--gpus-per-node=0", "--cpus-per-task=1", "sbatch/imagenet.sh"),
    *("--data", "synthetic", "--model", "resnet18", "--global-batch", "32", "--max-steps", "20"),
    *("--lr-warmup-epochs", "0"),
]
SMALLER = ["--train-crop", "32", "--val-crop", "32", "--max-steps", "3"]


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
    return tmp_path


def evaluate_by_torch(run, folder, example):
    """Return outputs and targets of the newest checkpoint, by plain torch in one process."""
    checkpoint.export(RunDirectory(run), run / "weights.safetensors")
    from safetensors.torch import load_file

    model = example.build("resnet18", CLASSES)
    model.load_state_dict(load_file(run / "weights.safetensors"))
    _, images, _ = example.load(example.parse(["--data", str(folder), *SMALL]))
    batch = next(iter(torch.utils.data.DataLoader(images, len(images))))
    pixels, targets = example.normalize(batch)
    with torch.no_grad():
        return model.eval()(pixels), targets


def submit(cluster, checkout, *words):
    """Submit the script, and return its run directory after a good end."""
    env = launches.on_cluster(cluster)
    job = cluster.run(["sbatch", "--parsable", *words], cwd=checkout, env=env).stdout.strip()
    _, code = cluster.ended(job, 240)
    assert code == 0, (checkout / f"imagenet-{job}.log").read_text()
    return checkout / "runs" / f"imagenet-{job}"


def test_sbatch_imagenet_evaluates_each_image_once_as_torch_does(cluster, checkout, imagenet):
    run = submit(cluster, checkout, *HOSTS, "sbatch/imagenet.sh", *SMALL)
    world = json.loads((run / "run.json").read_text())["world"]
    assert (world["hosts"], world["launcher"]) == (list(cluster.hosts), "hpctrain")
    rows = launches.rows(run)
    assert len(rows) == 3
    confusion = numpy.load(run / "confusion.npy")
    assert confusion.sum(1).tolist() == [2, 2, *[3] * (CLASSES - LEFT_OUT)]

    outputs, targets = evaluate_by_torch(run, checkout / "data" / "imagenet", imagenet)
    best = outputs.topk(5).indices == targets[:, None]
    row = rows[-1]
    assert (row["top1"], row["top5"]) == (best[:, 0].sum().item() / 37, best.sum().item() / 37)
    loss = torch.nn.functional.cross_entropy(outputs.double(), targets).item()
    assert row["eval_loss"] == pytest.approx(loss, rel=1e-5)
    expected = numpy.zeros_like(confusion)
    numpy.add.at(expected, (targets.numpy(), outputs.argmax(1).numpy()), 1)
    assert (confusion == expected).all()
    assert (expected.sum(0) > 0).sum() > 1  # else a model with one answer would pass


def test_sbatch_imagenet_trial_needs_no_images(cluster, checkout):
    script = (checkout / "sbatch" / "imagenet.sh").read_text().replace("\\\n#         ", "")
    assert " ".join(["sbatch", *TRIAL]) in script
    run = submit(cluster, checkout, *TRIAL, *SMALLER)
    assert json.loads((run / "summary.json").read_text())["step"] == 3
