"""ResNet on CIFAR-10, from the files that torchvision downloads.

The defaults are those of a published training of ResNet-18 with a global batch of 128, whose top-1
is 95.28 (mean of 5 runs; without cutout): arXiv 1708.04552, table 1, and train.py in
https://github.com/uoguelph-mlrg/Cutout.
"""

from argparse import BooleanOptionalAction

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets, models
from torchvision.transforms import v2

import hpctrain

# Mean and standard deviation of the training set's pixels, by channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


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


def load(session, folder, download):
    """Return training set and test set, as bytes; training images are shifted and mirrored."""
    if download:
        if session.is_main:
            datasets.CIFAR10(folder, download=True)
        session.sum(0)  # the other ranks wait for the download
    pixels = v2.PILToTensor()
    augment = v2.Compose([pixels, v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
    return (
        datasets.CIFAR10(folder, train=True, transform=augment),
        datasets.CIFAR10(folder, train=False, transform=pixels),
    )


def resnet(name):
    """Return a ResNet for 32×32 pixels, whose first layer keeps the size.

    Source: arXiv 1512.03385, section 4.2.
    """
    model = models.get_model(name, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def normalize(batch):
    """Return a batch of bytes as numbers, on its device."""
    images, targets = batch
    return v2.functional.normalize(images.float() / 255, MEAN, STD), targets


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
    with hpctrain.Session(args) as session:
        train_set, test_set = load(session, args.data, args.download)
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
        schedule = session.prepare(torch.optim.lr_scheduler.MultiStepLR(optimizer, ends, 0.2))
        with session.run() as run:
            for _ in run.epochs(200):
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    schedule.step()
                    run.log(loss=loss)
                run.log(**evaluate(session, model, test_loader).metrics())


if __name__ == "__main__":
    main()
