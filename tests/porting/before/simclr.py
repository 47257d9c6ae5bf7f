"""SimCLR: each row is compared with the rows of all ranks; started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from hpctrain.data import digits


def contrastive_loss(first, second, first_row):
    """Compare own rows, from `first_row` on, with all rows of the other view; temperature 0.5."""
    rows = torch.arange(len(first), device=first.device) + first_row
    return F.cross_entropy(first @ second.T / 0.5, rows)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
train_set, _ = digits()
train_set = Subset(train_set, range(192))
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, _ in loader:
        images = images.to(device)
        features = model(torch.cat([images, images.roll(1, -1)]))
        first, second = F.normalize(features, dim=1).chunk(2)
        everyone = torch.cat(all_gather(second.contiguous()))
        loss = contrastive_loss(first, everyone, rank * len(first))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
