"""Two heads that are used in turn, with find_unused_parameters, started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hpctrain.data import digits


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 2)])

    def forward(self, images, task):
        return self.heads[task](self.body(images))


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
train_set, _ = digits()
order = torch.arange(192).view(24, 8)  # a batch of digits, then one of odd and even, and so on
loader = DataLoader(train_set, batch_sampler=order[rank :: dist.get_world_size()].tolist())
model = DistributedDataParallel(TwoHeads().to(device), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    for step, (images, targets) in enumerate(loader):
        images, targets = images.to(device), targets.to(device)
        task = (step * dist.get_world_size() + rank) % 2
        loss = F.cross_entropy(model(images, task), targets % 2 if task else targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
