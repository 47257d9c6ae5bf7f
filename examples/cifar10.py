"""ResNet on CIFAR-10, from the original files of its Python version."""

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets, models
from torchvision.transforms import v2

import hpctrain

# Of the training set's pixels, by channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def resnet(name):
    """For 32×32 pixels: a first layer that keeps the size. Source: arXiv 1512.03385, section 4.2"""
    model = models.get_model(name, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class Images(torch.utils.data.Dataset):
    """Batches of the original files: 3072 bytes an image, by channel and row, and labels."""

    def __init__(self, folder, names, transform):
        self.images, self.targets, self.transform = [], [], transform
        for name in names:
            with open(Path(folder, "cifar-10-batches-py", name), "rb") as file:
                batch = pickle.load(file, encoding="bytes")  # noqa: S301  take it from whom you trust
            batch = {os.fsdecode(key): value for key, value in batch.items()}
            self.images += torch.as_tensor(batch["data"]).reshape(-1, 3, 32, 32)
            self.targets += batch["labels"]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.targets[index]


def load(folder, download):
    """Training set and test set."""
    normalize = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    augment = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    if download:
        datasets.CIFAR10(folder, download=True)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    try:
        return (
            Images(folder, names, v2.Compose(augment + normalize)),
            Images(folder, ["test_batch"], v2.Compose(normalize)),
        )
    except OSError as error:
        expected = "cifar-10-batches-py with data_batch_1 to 5 and test_batch in it"
        sys.exit(f"--data {folder}: {error}\n  expected: {expected}")


def evaluate(session, model, loader):
    model.eval()
    correct = count = 0
    with torch.no_grad(), session.autocast(), session.averaged_weights():
        for images, targets in loader:
            correct += (model(images).argmax(1) == targets).sum().item()
            count += len(targets)
    model.train()
    correct, count = session.sum(correct, count)
    return correct / count


def main():
    parser = hpctrain.options(description=__doc__)
    parser.add_argument("--model", default="resnet18", help="resnet18 or resnet50 (resnet18)")
    args = parser.parse_args()
    train_set, test_set = load(args.data, args.download)
    with hpctrain.Session(args) as session:
        train_loader = session.loader(train_set)
        test_loader = session.loader(test_set, train=False)
        model = resnet(args.model)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        model, optimizer = session.prepare(model, optimizer)
        with session.run() as run:
            for _ in run.epochs(30):
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    run.log(loss=loss)
                run.log(top1=evaluate(session, model, test_loader))


if __name__ == "__main__":
    main()
