"""Two heads that are used in turn."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.data import digits


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 2)])

    def forward(self, images, task):
        return self.heads[task](self.body(images))


args = hpctrain.options().parse_args()
with hpctrain.Session(args) as session:
    train_set, _ = digits()
    order = torch.arange(192).view(24, 8)  # a batch of digits, then one of odd and even, and so on
    loader = DataLoader(train_set, batch_sampler=order.tolist())
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    with session.run() as run:
        for _ in run.epochs(2):
            for images, targets in run.batches(loader):
                task = (run.step * session.world.world_size + session.world.rank) % 2
                with session.autocast():
                    loss = F.cross_entropy(model(images, task), targets % 2 if task else targets)
                session.step(loss)
                run.log(loss=loss)
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
