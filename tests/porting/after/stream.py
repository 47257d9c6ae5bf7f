"""A streamed data set whose shards have different lengths."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hpctrain


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


args = hpctrain.options().parse_args()
with hpctrain.Session(args) as session:
    rank, world_size = session.world.rank, session.world.world_size
    loader = DataLoader(Shards(rank, world_size), batch_size=8)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    with session.run() as run:
        for _ in run.epochs(2):
            for x, y in run.batches(loader):
                with session.autocast():
                    loss = (model(x) - y).square().mean()
                session.step(loss)
                run.log(loss=loss)
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
