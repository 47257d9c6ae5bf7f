"""Digits in the manner of Horovod's example for MNIST."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import hpctrain
from hpctrain.data import digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3)
        self.first, self.second = nn.Linear(72, 32), nn.Linear(32, 10)

    def forward(self, images):
        x = F.relu(F.max_pool2d(self.convolution(images), 2))
        return self.second(F.relu(self.first(x.flatten(1))))


args = hpctrain.options().parse_args()
with hpctrain.Session(args, seed=42) as session:
    train_set, test_set = digits()
    train_set = Subset(train_set, range(192))
    train_loader = DataLoader(train_set, batch_size=8)
    test_loader = DataLoader(test_set, batch_size=64)
    model = Net()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02 * session.world.world_size, momentum=0.5
    )
    model, optimizer, train_loader, test_loader = session.prepare(
        model, optimizer, train_loader, test_loader
    )

    with session.run() as run:
        for _ in run.epochs(2):
            model.train()
            for images, targets in run.batches(train_loader):
                with session.autocast():
                    loss = F.cross_entropy(model(images), targets)
                session.step(loss)
                run.log(loss=loss)
            model.eval()
            correct = 0
            with torch.no_grad():
                for images, targets in test_loader:
                    correct += (model(images).argmax(1) == targets).sum()
            run.log(top1=session.sum(correct) / len(test_set))
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
