"""Sharpness-aware minimization, which steps twice; started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

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


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
train_set, _ = digits()
train_set = Subset(train_set, range(192))
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
model = DistributedDataParallel(model)
sam = SAM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        sam.first_step()
        F.cross_entropy(model(images), targets).backward()
        sam.second_step()
    if rank == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
