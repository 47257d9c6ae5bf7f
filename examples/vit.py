"""A Vision Transformer of timm, with AdamW, layer-wise rates, warm-up, cosine and an average."""

import math
from functools import partial

import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hpctrain
from hpctrain.data import digits


def options():
    parser = hpctrain.options(description=__doc__)
    add = parser.add_argument_group("options of this example").add_argument
    add("--lr", type=float, default=5e-3, metavar="X", help="rate of the head (%(default)s)")
    add("--warmup", type=float, default=0.5, metavar="X", help="epochs of warm-up (%(default)s)")
    add("--ema", type=float, default=0.99, metavar="X", help="decay of the average (%(default)s)")
    add("--model", default="vit_tiny_patch16_224", help="name of a ViT of timm (%(default)s)")
    add("--width", type=int, default=64, metavar="N", help="numbers in a token (%(default)s)")
    add("--depth", type=int, default=4, metavar="N", help="number of blocks (%(default)s)")
    add("--weight-decay", type=float, default=0.05, metavar="X", help="(%(default)s)")
    text = "factor between the rates of a block and the one behind it (%(default)s)"
    add("--layer-decay", type=float, default=0.75, metavar="X", help=text)
    return parser


def build(args, dataset):
    """Return the model, for images of the data set in 4 × 4 patches, and its optimizer."""
    model = timm.create_model(
        args.model,
        img_size=dataset.size,
        patch_size=dataset.size[0] // 4,
        in_chans=1,
        num_classes=dataset.classes,
        embed_dim=args.width,
        depth=args.depth,
        num_heads=args.width // 16,
    )
    groups = param_groups_layer_decay(
        model, args.weight_decay, model.no_weight_decay(), layer_decay=args.layer_decay
    )
    for group in groups:
        # timm's own schedulers multiply by lr_scale in each step; others do not know it.
        group["lr"] = args.lr * group.pop("lr_scale")
    return model, torch.optim.AdamW(groups)


def rate(step, warmup, steps):
    """Return the factor of the learning rates: up in a line, then down to 0 in half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    part = min(1.0, (step - warmup) / max(1, steps - warmup))
    return (1 + math.cos(math.pi * part)) / 2


def evaluate(session, model, loader, classes):
    scores = session.classification(classes)
    model.eval()
    with torch.no_grad(), session.autocast():
        for images, targets in loader:
            scores.update(model(images), targets)
    model.train()
    return scores.compute()


def main():
    args = options().parse_args()
    with hpctrain.Session(args) as session:
        train_set, test_set = digits()
        train_loader = session.loader(train_set)
        test_loader = session.loader(test_set, train=False)
        model, optimizer = build(args, train_set)
        average = AveragedModel(model, session.device, multi_avg_fn=get_ema_multi_avg_fn(args.ema))
        average.requires_grad_(False)
        model, average, optimizer = session.prepare(model, average, optimizer)
        epochs = args.epochs or 5
        length = len(train_loader) // session.batches.accumulate  # steps of an epoch
        sizes = {"warmup": round(args.warmup * length), "steps": epochs * length}
        schedule = session.prepare(LambdaLR(optimizer, partial(rate, **sizes)))

        with session.run() as run:
            for _ in run.epochs(epochs):
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    schedule.step()
                    if session.sync_gradients:  # not between the micro-batches of a step
                        average.update_parameters(model)
                    run.log(loss=loss)
                run.log(**evaluate(session, average, test_loader, train_set.classes).metrics())


if __name__ == "__main__":
    main()
