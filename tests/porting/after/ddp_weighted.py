"""Digits with a sampler of one's own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler

import hpctrain
from hpctrain.data import digits


class WeightedSampler(Sampler):
    def __init__(self, weights, samples):
        self.weights, self.samples = weights, samples
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.multinomial(self.weights, self.samples, True, generator=generator)
        return iter(order.tolist())

    def __len__(self):
        return self.samples


args = hpctrain.options().parse_args()
with hpctrain.Session(args) as session:
    train_set, _ = digits()
    labels = torch.tensor([label for _, label in train_set])
    weights = 1 / labels.bincount()[labels]
    sampler = WeightedSampler(weights, 192)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    with session.run() as run:
        for _ in run.epochs(2):
            for images, targets in run.batches(loader):
                with session.autocast():
                    loss = F.cross_entropy(model(images), targets)
                session.step(loss)
                run.log(loss=loss)
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
