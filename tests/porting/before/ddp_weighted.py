"""Digits with DistributedDataParallel and a sampler of one's own, started by torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from hpctrain.data import digits


class WeightedSampler(Sampler):
    def __init__(self, weights, samples, rank, world_size):
        self.weights, self.samples = weights, samples
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.multinomial(self.weights, self.samples, True, generator=generator)
        return iter(order[self.rank :: self.world_size].tolist())

    def __len__(self):
        return self.samples // self.world_size


cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.manual_seed(0)
train_set, _ = digits()
labels = torch.tensor([label for _, label in train_set])
weights = 1 / labels.bincount()[labels]
sampler = WeightedSampler(weights, 192, rank, world_size)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"epoch {epoch}  loss {loss.item() / world_size:.4f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
