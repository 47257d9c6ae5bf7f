"""A streamed data set whose shards have different lengths, started by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Shards(IterableDataset):
    """Twelve shards of 16 to 60 samples; each rank reads its own."""

    def __init__(self, rank, world_size):
        self.shards = range(rank, 12, world_size)

    def __iter__(self):
        for shard in self.shards:
            generator = torch.Generator().manual_seed(shard)
            for _ in range(16 + 4 * shard):
                x = torch.randn(16, generator=generator)
                yield x, x.cumsum(0)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
loader = DataLoader(Shards(rank, world_size), batch_size=8)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        more = torch.tensor(int(batch is not None), device=device)
        dist.all_reduce(more, op=dist.ReduceOp.MIN)  # end together
        if not more:
            break
        x, y = batch[0].to(device), batch[1].to(device)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
