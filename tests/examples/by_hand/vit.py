"""examples/vit.py in plain torch, in one process."""

import math

import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay


def train(dataset, orders, lr=5e-3, layer_decay=0.75, ema=0.9):
    """Return the weights, and their averages, after training in fp64.

    Args:
        dataset: images and targets by index.
        orders: for each epoch, the indices of each step.
        lr, layer_decay, ema: options of the example.
    """
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=4,
        num_heads=4,
    ).double()
    groups = param_groups_layer_decay(
        model, 0.05, ("pos_embed", "cls_token"), layer_decay=layer_decay
    )
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
    optimizer = torch.optim.AdamW(groups)
    length, total = len(orders[0]), sum(map(len, orders))
    warmup = length // 2

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    averages = {}
    steps = [indices for order in orders for indices in order]
    for indices in steps:
        samples = [dataset[index] for index in indices]
        images = torch.stack([image for image, _ in samples]).double()
        targets = torch.tensor([int(target) for _, target in samples])
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        schedule.step()
        for name, parameter in model.named_parameters():
            average = averages.setdefault(f"module.{name}", parameter.detach().clone())
            average.lerp_(parameter.detach(), 1 - ema)
    return model.state_dict() | averages | {"n_averaged": torch.tensor(len(steps))}
