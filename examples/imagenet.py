"""A torchvision model trained on ImageNet, from folders of images or from shards."""

import argparse
import difflib
import sys

import numpy
import torch
import torch.nn.functional as F

import hpctrain
from hpctrain import data
from hpctrain.errors import DataError, UsageError

try:
    from torchvision import models
    from torchvision.transforms import v2

    missing = None
except (ImportError, RuntimeError, OSError) as error:  # also if it was built for another torch
    missing = error

# Mean and standard deviation of the training set's pixels, by channel.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def number(kind, least, most):
    """Return a type for argparse: a number from `least` to `most`."""

    def read(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return value

    read.__name__ = kind.__name__  # for argparse's messages
    return read


def options():
    parser = hpctrain.options(recipe=True, description=__doc__)
    parser.set_defaults(data="imagenet", lr=0.1, workers="auto")
    group = parser.add_argument_group("options of this example")
    add = group.add_argument
    add("--model", default="resnet50", help="name of a torchvision model (%(default)s)")
    for name, default, least, most, text in (
        ("train-crop", 224, 1, 10_000, "side of the crop in pixels"),
        ("val-crop", 224, 1, 10_000, "side of the crop in pixels"),
        ("val-resize", 256, 1, 10_000, "shorter side before the crop, in pixels"),
        ("max-corrupt", 0, 0, 10**9, "most unreadable images in each of the two sets"),
        ("weight-decay", 1e-4, 0.0, 1.0, "weight decay of the optimizer"),
        ("label-smoothing", 0.0, 0.0, 1.0, "label smoothing of the targets"),
        ("mixup", 0.0, 0.0, 100.0, "alpha of arXiv 1710.09412"),
        ("cutmix", 0.0, 0.0, 100.0, "alpha of arXiv 1905.04899"),
        ("random-erase", 0.0, 0.0, 1.0, "probability of arXiv 1708.04896"),
    ):
        kind, text = number(type(default), least, most), f"{text} (%(default)s)"
        add(f"--{name}", type=kind, default=default, metavar="N", help=text)
    add("--trivial-augment", action="store_true", help="arXiv 2103.10158")
    add("--rand-augment", action="store_true", help="arXiv 1909.13719")
    add("--nesterov", action="store_true", help="use Nesterov momentum")
    return parser


def load(args):
    """Return training set, validation set, and the names of the classes."""
    if args.data == "synthetic":
        train_set = data.SyntheticImages(131_072, args.train_crop, 1000)
        val_set = data.SyntheticImages(2_048, args.val_crop, 1000)
        return train_set, val_set, [str(number) for number in range(1000)]
    augment = []
    if args.trivial_augment:
        augment.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if args.rand_augment:
        augment.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    if args.random_erase:
        mean = [round(255 * value) for value in MEAN]
        augment.append(v2.RandomErasing(args.random_erase, value=mean))
    crop = data.RandomResizedCrop(args.train_crop, augment=v2.Compose(augment) if augment else None)
    if args.val_crop > args.val_resize:
        raise UsageError(
            "HT001",
            f"--val-crop {args.val_crop} of --val-resize {args.val_resize}",
            "a crop no larger than that",
            f"--val-resize {args.val_crop * 8 // 7}",
        )
    centre = data.CenterCrop(args.val_crop, resize=args.val_resize)
    train, val = (data.image_source(args.data, split) for split in ("train", "val"))
    if len(data.same_classes(train, val)) < 2:
        raise UsageError(
            "HT001",
            f"{train.place} has one class, {train.classes[0]}",
            "two classes or more",
            "a folder for each class, with its images",
        )
    return (
        data.ImageSet(train, crop, max_corrupt=args.max_corrupt),
        data.ImageSet(val, centre, max_corrupt=args.max_corrupt),
        train.classes,
    )


def build(name, classes):
    names = models.list_models(module=models)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1) or ["resnet50"]
        raise UsageError(
            "HT001",
            f"--model {name}",
            f"one of torchvision's: {', '.join(names)}",
            f"--model {near[0]}",
        )
    # Their second output, for training only, is off: the loss below does not use it.
    two = name in ("googlenet", "inception_v3")
    more = {"aux_logits": False, "init_weights": True} if two else {}
    return models.get_model(name, num_classes=classes, **more)


def blend(args):
    """Return mixup, cutmix, or a random choice of both for each micro-batch."""
    chosen = [kind(alpha=a) for kind, a in ((v2.MixUp, args.mixup), (v2.CutMix, args.cutmix)) if a]
    return v2.RandomChoice(chosen) if chosen else v2.Identity()


def soften(targets, classes, smoothing):
    """Return probabilities (N, classes); those of an unreadable image are 0, so it has no loss."""
    hot = targets[:, None] == torch.arange(classes, device=targets.device)
    soft = torch.where(hot, 1 - smoothing + smoothing / classes, smoothing / classes)
    return soft * (targets >= 0)[:, None]


def evaluate(session, model, loader, classes):
    scores = session.classification(classes)
    model.eval()
    with torch.no_grad(), session.autocast(), session.averaged_weights():
        for images, targets in loader:
            scores.update(model(images), targets)
    model.train()
    return scores.compute()


def check(args, split, unreadable):
    """Check the sum over all ranks after an epoch: a rank counts only its own images."""
    if unreadable > args.max_corrupt:
        raise DataError(
            "HT001",
            f"{unreadable} images of {args.data}/{split} cannot be decoded; each has a warning",
            f"at most {args.max_corrupt} such files",
            "fetch them again",
            f"--max-corrupt {2 * unreadable}, to continue without them",
        )


def keep(folder, result, names):
    """Write the confusion matrix, with true classes as rows, and the accuracy of each class."""
    part = folder / ".part"  # renamed, so that a reader never sees a partial file
    with part.open("wb") as file:
        numpy.save(file, result.confusion.numpy())
    part.replace(folder / "confusion.npy")
    counts = result.confusion.sum(1).tolist()
    names = [name.translate({9: r"\t", 10: r"\n", 13: r"\r"}) for name in names]
    lines = zip(names, counts, result.per_class.tolist(), strict=True)
    text = "".join(f"{name}\t{count}\t{top1:.6f}\n" for name, count, top1 in lines)
    # Folder names need not be UTF-8: surrogateescape keeps their bytes.
    part.write_text("class\timages\ttop1\n" + text, encoding="utf-8", errors="surrogateescape")
    part.replace(folder / "classes.tsv")


def main():
    args = options().parse_args()
    if missing is not None:
        raise UsageError(
            "HT515",
            f"torchvision cannot be imported: {missing}",
            "torchvision, which has the models",
            f"{sys.executable} -m pip install 'hpctrain[vision]'",
        )
    if args.data == "synthetic":
        args.workers = 0  # workers would only copy the images
    with hpctrain.Session(args) as session:
        train_set, val_set, names = load(args)
        normalize = data.Normalize(MEAN, STD)
        train_loader = session.loader(train_set, on_device=normalize)
        val_loader = session.loader(val_set, train=False, on_device=normalize)
        model = build(args.model, len(names))
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=args.lr,
            momentum=0.9,
            weight_decay=args.weight_decay,
            nesterov=args.nesterov,
            fused=session.device.type == "cuda",
        )
        model, optimizer = session.prepare(model, optimizer)
        mix = blend(args)
        with session.run() as run:
            for _ in run.epochs(90):
                unreadable = torch.zeros((), dtype=torch.int64, device=session.device)
                for images, targets in run.batches(train_loader):
                    unreadable += (targets < 0).sum()
                    images, targets = mix(images, soften(targets, len(names), args.label_smoothing))
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    run.log(loss=loss)
                check(args, "train", session.sum(unreadable))
                result = evaluate(session, model, val_loader, len(names))
                run.log(**result.metrics(), ignored=result.ignored)
                check(args, "val", result.ignored)
                if session.is_main:
                    keep(run.directory.path, result, names)


if __name__ == "__main__":
    main()
