"""ResNet on CIFAR-10, from the original files of its Python version.

The defaults are those of a published training of ResNet-18 with a global batch of 128, whose top-1
is 95.28 (mean of 5 runs; without cutout): arXiv 1708.04552, table 1, and train.py in
https://github.com/uoguelph-mlrg/Cutout.
"""

import pickle
import sys
from argparse import BooleanOptionalAction
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import hpctrain
from hpctrain import data
from hpctrain.errors import UsageError

try:
    from torchvision import datasets, models

    missing = None
except (ImportError, RuntimeError, OSError) as error:  # also if it was built for another torch
    missing = error

# Mean and standard deviation of the training set's pixels, by channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TRAIN, TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]


def options():
    parser = hpctrain.options(description=__doc__.splitlines()[0])
    group = parser.add_argument_group("options of this example")
    text = "folder of cifar-10-batches-py (%(default)s)"
    group.add_argument("--data", default="data/cifar10", metavar="FOLDER", help=text)
    group.add_argument("--download", action="store_true", help="download the data if missing")
    group.add_argument("--lr", type=float, default=0.1, metavar="X", help="(%(default)s)")
    text = "epochs after which the learning rate is a fifth (60 120 160)"
    group.add_argument(
        "--lr-steps", type=int, nargs="*", default=[60, 120, 160], metavar="N", help=text
    )
    names = ("resnet18", "resnet34", "resnet50")
    group.add_argument("--model", default=names[0], choices=names, help="(%(default)s)")
    group.add_argument(
        "--weight-decay", type=float, default=5e-4, metavar="X", help="(%(default)s)"
    )
    group.add_argument("--nesterov", action=BooleanOptionalAction, default=True, help="(on)")
    return parser


class Plain(pickle.Unpickler):
    """Unpickler that reads only arrays and their parts; other pickles could run any code."""

    def find_class(self, module, name):
        allowed = {
            "_reconstruct": numpy.empty(0).__reduce__()[0],  # its module differs by NumPy version
            "ndarray": numpy.ndarray,
            "dtype": numpy.dtype,
        }
        if module.split(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is no array")


def read(path):
    """Return images and labels of an original file: 3072 bytes per image, by channel and row."""
    try:
        with open(path, "rb") as file:
            batch = Plain(file, encoding="bytes").load()
        images = torch.from_numpy(batch[b"data"]).reshape(-1, 3, 32, 32)
        labels = torch.tensor(batch[b"labels"])
        if images.dtype != torch.uint8 or labels.shape != (len(images),):
            raise ValueError(f"{len(images)} images of {images.dtype}, and {labels.shape} labels")
    except Exception as error:  # a damaged pickle can raise any exception
        raise UsageError(
            "HT001",
            f"{path}: {error or type(error).__name__}",
            f"CIFAR-10's Python version: cifar-10-batches-py with {', '.join(TRAIN + TEST)} in it",
            "--data FOLDER of cifar-10-batches-py",
            "--download",
        ) from None
    return images, labels


class Images(torch.utils.data.Dataset):
    """uint8 images (3, 32, 32) in memory; `augment` shifts by up to 4 pixels and draws a flip."""

    def __init__(self, folder, names, augment):
        parts = [read(Path(folder, "cifar-10-batches-py", name)) for name in names]
        self.images, self.targets = (torch.cat(part) for part in zip(*parts, strict=True))
        if augment:
            self.images = F.pad(self.images, (4, 4, 4, 4))
        self.random = augment

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image, target = self.images[index], self.targets[index]
        if not self.random:
            return image, target
        top, left = torch.randint(0, 9, (2,)).tolist()
        flip = torch.rand(()).item() < 0.5
        return image[:, top : top + 32, left : left + 32], flip, target


def load(session):
    """Return training set and test set."""
    folder = session.options.data
    if session.options.download:
        if session.is_main:
            datasets.CIFAR10(folder, download=True)
        session.sum(0)  # the other ranks wait for the download
    return Images(folder, TRAIN, augment=True), Images(folder, TEST, augment=False)


def resnet(name):
    """Return a ResNet for 32×32 pixels, whose first layer keeps the size.

    Source: arXiv 1512.03385, section 4.2.
    """
    model = models.get_model(name, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def evaluate(session, model, loader):
    scores = session.classification(10)
    model.eval()
    with torch.no_grad(), session.autocast():
        for images, targets in loader:
            scores.update(model(images), targets)
    model.train()
    return scores.compute()


def main():
    args = options().parse_args()
    if missing is not None:
        raise UsageError(
            "HT515",
            f"torchvision cannot be imported: {missing}",
            "torchvision, which has the models",
            f"{sys.executable} -m pip install 'hpctrain[vision]'",
        )
    with hpctrain.Session(args) as session:
        train_set, test_set = load(session)
        normalize = data.Normalize(MEAN, STD)
        train_loader = session.loader(train_set, on_device=normalize)
        test_loader = session.loader(test_set, train=False, on_device=normalize)
        model = resnet(args.model)
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=args.lr,
            momentum=0.9,
            weight_decay=args.weight_decay,
            nesterov=args.nesterov,
            fused=session.device.type == "cuda",
        )
        model, optimizer = session.prepare(model, optimizer)
        length = len(train_loader) // session.batches.accumulate  # steps of an epoch
        ends = [epochs * length for epochs in args.lr_steps]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, ends, 0.2)
        with session.run(state={"schedule": schedule}) as run:
            for _ in run.epochs(200):
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    if session.sync_gradients:  # not between the micro-batches of a step
                        schedule.step()
                    run.log(loss=loss)
                run.log(**evaluate(session, model, test_loader).metrics())


if __name__ == "__main__":
    main()
