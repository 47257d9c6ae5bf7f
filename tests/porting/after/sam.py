"""Sharpness-aware minimization, which steps twice."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import hpctrain
from hpctrain.data import digits


class SAM:
    """Move uphill by `radius`, and take the step with the gradients from there."""

    def __init__(self, base_optimizer, radius=0.05):
        self.base_optimizer, self.radius = base_optimizer, radius
        self.parameters = base_optimizer.param_groups[0]["params"]

    @torch.no_grad()
    def first_step(self):
        gradients = [parameter.grad for parameter in self.parameters]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12
        self.moves = [gradient * (self.radius / norm) for gradient in gradients]
        for parameter, move in zip(self.parameters, self.moves, strict=True):
            parameter.add_(move)
        self.base_optimizer.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter, move in zip(self.parameters, self.moves, strict=True):
            parameter.sub_(move)
        self.base_optimizer.step()
        self.base_optimizer.zero_grad()


args = hpctrain.options().parse_args()
with hpctrain.Session(args) as session:
    train_set, _ = digits()
    train_set = Subset(train_set, range(192))
    loader = DataLoader(train_set, batch_size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    sam = SAM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    model, _, loader = session.prepare(model, sam.base_optimizer, loader)

    with session.run() as run:
        for _ in run.epochs(2):
            for images, targets in run.batches(loader):
                loss = F.cross_entropy(model(images), targets)
                session.backward(loss)
                sam.first_step()
                session.backward(F.cross_entropy(model(images), targets))
                sam.second_step()
                run.log(loss=loss)
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
