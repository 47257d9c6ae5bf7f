"""examples/finetune.py in plain torch, in one process."""

import torch
import torch.nn.functional as F
from torchvision.models import resnet18


def train(dataset, orders, lr=0.02, backbone_rate=0.1, unfreeze_epoch=1):
    """Return the weights after training in fp64.

    Args:
        dataset: images and targets by index.
        orders: for each epoch, the indices of each step.
        lr, backbone_rate, unfreeze_epoch: options of the example.
    """
    torch.manual_seed(0)
    model = resnet18(num_classes=dataset.classes).double().eval()
    head = list(model.fc.parameters())
    backbone = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
    groups = [{"params": head, "lr": lr}, {"params": backbone, "lr": lr * backbone_rate}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for epoch, order in enumerate(orders):
        for parameter in backbone:
            parameter.requires_grad_(epoch >= unfreeze_epoch)
        for indices in order:
            samples = [dataset[index] for index in indices]
            images = torch.stack([image for image, _ in samples]).double().expand(-1, 3, -1, -1)
            images = F.interpolate(images, scale_factor=2.0)
            targets = torch.tensor([int(target) for _, target in samples])
            optimizer.zero_grad()
            F.cross_entropy(model(images), targets).backward()
            optimizer.step()
    return model.state_dict()
