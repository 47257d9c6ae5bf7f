"""A model of torchvision's on ImageNet, from folders of images."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision import datasets, models
from torchvision.transforms import v2

import hpctrain

# Of the training set's pixels, by channel.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(folder):
    """Training set and validation set: FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg."""
    normalize = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    train = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *normalize]
    val = [v2.Resize(256), v2.CenterCrop(224), *normalize]
    try:
        train_set = datasets.ImageFolder(Path(folder, "train"), v2.Compose(train))
        val_set = datasets.ImageFolder(Path(folder, "val"), v2.Compose(val))
    except OSError as error:
        sys.exit(
            f"--data {folder}: {error}\n  expected: train/CLASS/*.jpg and val/CLASS/*.jpg in it"
        )
    if train_set.classes != val_set.classes:
        sys.exit(
            f"--data {folder}: train/ has {len(train_set.classes)} classes and val/ "
            f"{len(val_set.classes)}\n  expected: the same folders in both"
        )
    return train_set, val_set


def evaluate(session, model, loader):
    model.eval()
    top1 = top5 = count = 0
    with torch.no_grad(), session.autocast(), session.averaged_weights():
        for images, targets in loader:
            outputs = model(images)
            best = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]
            top1 += best[:, 0].sum().item()
            top5 += best.sum().item()
            count += len(targets)
    model.train()
    top1, top5, count = session.sum(top1, top5, count)
    return {"top1": top1 / count, "top5": top5 / count}


def main():
    parser = hpctrain.options(description=__doc__)
    parser.add_argument(
        "--model", default="resnet50", help="name of a torchvision model (resnet50)"
    )
    args = parser.parse_args()
    train_set, val_set = load(args.data)
    with hpctrain.Session(args) as session:
        train_loader = session.loader(train_set)
        val_loader = session.loader(val_set, train=False)
        model = models.get_model(args.model, num_classes=len(train_set.classes))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        model, optimizer = session.prepare(model, optimizer)
        with session.run() as run:
            for _ in run.epochs(90):
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets, label_smoothing=0.1)
                    session.step(loss)
                    run.log(loss=loss)
                run.log(**evaluate(session, model, val_loader))


if __name__ == "__main__":
    main()
