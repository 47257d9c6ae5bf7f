"""A torchvision model trained on ImageNet, from folders of images."""

import argparse
import difflib
import math
import os
import tomllib
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

import hpctrain
from hpctrain.data import SkipUnreadable
from hpctrain.errors import DataError, UsageError

# Mean and standard deviation of the training set's pixels, by channel.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IGNORED = -100  # target of an unreadable image


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
    parser = hpctrain.options(description=__doc__)
    parser.set_defaults(workers="auto")
    group = parser.add_argument_group("options of this example")
    add = group.add_argument
    text = "TOML file with defaults for this command line: option names, with _ for -, and values"
    add("--recipe", metavar="FILE", help=text)
    text = "folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or synthetic (%(default)s)"
    add("--data", default="imagenet", metavar="PATH|synthetic", help=text)
    add("--model", default="resnet50", help="name of a torchvision model (%(default)s)")
    for name, default, least, most, text in (
        ("train-crop", 224, 1, 10_000, "side of the crop in pixels"),
        ("val-crop", 224, 1, 10_000, "side of the crop in pixels"),
        ("val-resize", 256, 1, 10_000, "shorter side before the crop, in pixels"),
        ("max-unreadable", 0, 0, 10**9, "most unreadable images in each of the two sets"),
        ("lr", 0.1, 0.0, 1e3, "learning rate for a global batch of 256, in proportion for others"),
        ("lr-warmup-epochs", 0.0, 0.0, 1e6, "epochs in which the rate grows from 0"),
        ("lr-step-epochs", 30, 1, 10**6, "epochs between two steps of the rate"),
        ("lr-step-factor", 0.1, 0.0, 1.0, "factor of a step"),
        ("momentum", 0.9, 0.0, 1.0, "momentum of the optimizer"),
        ("weight-decay", 1e-4, 0.0, 1.0, "weight decay of the optimizer"),
        ("label-smoothing", 0.0, 0.0, 1.0, "label smoothing of the targets"),
        ("mixup", 0.0, 0.0, 100.0, "alpha of arXiv 1710.09412"),
        ("cutmix", 0.0, 0.0, 100.0, "alpha of arXiv 1905.04899"),
        ("random-erase", 0.0, 0.0, 1.0, "probability of arXiv 1708.04896"),
        ("ema", 0.0, 0.0, 1.0, "decay of a moving average of the weights, to evaluate; 0 for none"),
    ):
        kind, text = number(type(default), least, most), f"{text} (%(default)s)"
        add(f"--{name}", type=kind, default=default, metavar="N", help=text)
    add("--lr-schedule", default="step", choices=("step", "cosine"), help="(%(default)s)")
    add("--norm-decay", action=argparse.BooleanOptionalAction, default=True, help="decay biases")
    add("--trivial-augment", action="store_true", help="arXiv 2103.10158")
    add("--rand-augment", action="store_true", help="arXiv 1909.13719")
    add("--nesterov", action="store_true", help="use Nesterov momentum")
    return parser


def parse(words=None):
    """Return the values of a command line; those of its recipe are the defaults."""
    parser = options()
    args = parser.parse_known_args(words)[0]
    if args.recipe is None:
        return parser.parse_args(words)
    try:
        values = tomllib.loads(Path(args.recipe).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--recipe {args.recipe}: {error}")
    if unknown := values.keys() - vars(args).keys() - {"about"}:
        parser.error(f"--recipe {args.recipe}: {', '.join(sorted(unknown))}: no such option")
    parser.set_defaults(**values)
    return parser.parse_args(words)


def load(args):
    """Return training set, validation set, and the names of the classes."""
    if args.data == "synthetic":
        sets = [
            FakeData(samples, (3, side, side), 1000, v2.PILToTensor())
            for samples, side in ((131_072, args.train_crop), (512, args.val_crop))
        ]
        return *sets, [str(number) for number in range(1000)]
    pixels = v2.PILToTensor()
    crop = [pixels, v2.RandomResizedCrop(args.train_crop), v2.RandomHorizontalFlip()]
    if args.trivial_augment:
        crop.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if args.rand_augment:
        crop.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    if args.random_erase:
        mean = [round(255 * value) for value in MEAN]
        crop.append(v2.RandomErasing(args.random_erase, value=mean))
    centre = [pixels, v2.Resize(args.val_resize), v2.CenterCrop(args.val_crop)]
    # A job's own copy of the data, if there is one.
    folder = Path(os.environ.get("HPCTRAIN_DATA", ""), args.data)
    try:
        train = ImageFolder(folder / "train", v2.Compose(crop))
        val = ImageFolder(folder / "val", v2.Compose(centre))
    except OSError as error:
        expected = f"{folder}/train/CLASS/*.jpg, and the same with val"
        raise UsageError.of_text(
            "HT001", f"--data {args.data}: {error}", expected, "--data PATH"
        ) from None
    if train.classes != val.classes:
        one = min(set(train.classes) ^ set(val.classes))
        raise UsageError.of_text("HT001", f"only one split has the class {one}", "the same in both")
    return skipping(train, args.train_crop, args), skipping(val, args.val_crop, args), train.classes


def skipping(dataset, side, args):
    """Return the data set with grey images in place of unreadable ones, which have no class."""
    grey = torch.full((3, side, side), 128, dtype=torch.uint8)
    return SkipUnreadable(dataset, args.max_unreadable, (grey, IGNORED))


def normalize(batch):
    """Return a batch of bytes as numbers with mean 0 and standard deviation 1, on its device."""
    images, targets = batch
    images = v2.functional.to_dtype(images, torch.float32, scale=True)
    return v2.functional.normalize(images, MEAN, STD), targets


def build(name, classes):
    names = models.list_models(module=models)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1) or ["resnet50"]
        raise UsageError.of_text(
            "HT001",
            f"--model {name}",
            f"one of torchvision's: {', '.join(names)}",
            f"--model {near[0]}",
        )
    # Their second output, for training only, is off: the loss below does not use it.
    two = name in ("googlenet", "inception_v3")
    more = {"aux_logits": False, "init_weights": True} if two else {}
    return models.get_model(name, num_classes=classes, **more)


def make_optimizer(session, args, model):
    """Return SGD, with a rate in proportion to the global batch (arXiv 1706.02677)."""
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    decay = args.weight_decay if args.norm_decay else 0.0
    return torch.optim.SGD(
        [{"params": matrices}, {"params": vectors, "weight_decay": decay}],
        lr=args.lr * session.batches.global_batch / 256,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        nesterov=args.nesterov,
        fused=session.device.type == "cuda",
    )


def make_schedule(args, optimizer, epoch, epochs):
    """Return the schedule of the rate, which steps with each update.

    Args:
        args: parsed command line.
        optimizer: prepared optimizer.
        epoch: number of updates in an epoch.
        epochs: number of epochs without `--epochs`.
    """
    warmup = round(args.lr_warmup_epochs * epoch)
    end = args.max_steps or (args.epochs or epochs) * epoch

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        if args.lr_schedule == "step":
            return args.lr_step_factor ** (step // (args.lr_step_epochs * epoch))
        return 0.5 + 0.5 * math.cos(math.pi * min((step - warmup) / max(end - warmup, 1), 1))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


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
    with torch.no_grad(), session.autocast():
        for images, targets in loader:
            scores.update(model(images), targets)
    model.train()
    return scores.compute()


def check(args, split, unreadable):
    """Check the sum over all ranks after an epoch: a rank counts only its own images."""
    if unreadable > args.max_unreadable:
        raise DataError.of_text(
            "HT001",
            f"{unreadable} images of {args.data}/{split} cannot be read; each has a warning",
            f"at most {args.max_unreadable} such files",
            "fetch them again",
            f"--max-unreadable {2 * unreadable}, to continue without them",
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
    args = parse()
    with hpctrain.Session(args) as session:
        train_set, val_set, names = load(args)
        train_loader = session.loader(train_set, on_device=normalize)
        val_loader = session.loader(val_set, train=False, on_device=normalize)
        net = build(args.model, len(names))
        average = None
        if args.ema:
            decay = get_ema_multi_avg_fn(args.ema)
            average = AveragedModel(net, multi_avg_fn=decay, use_buffers=True).requires_grad_(False)
        model, optimizer = session.prepare(net, make_optimizer(session, args, net))
        if average is not None:
            average = session.prepare(average)
        epoch = len(train_loader) // session.batches.accumulate
        schedule = session.prepare(make_schedule(args, optimizer, epoch, epochs=90))
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
                    schedule.step()
                    if average is not None and session.sync_gradients:
                        average.update_parameters(model)
                    run.log(loss=loss)
                check(args, "train", session.sum(unreadable))
                result = evaluate(
                    session, model if average is None else average, val_loader, len(names)
                )
                run.log(**result.metrics(), ignored=result.ignored)
                check(args, "val", result.ignored)
                if session.is_main:
                    keep(run.directory.path, result, names)


if __name__ == "__main__":
    main()
