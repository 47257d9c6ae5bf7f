"""Digits in the manner of Horovod's example for MNIST, started by horovodrun."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from hpctrain.data import digits

hvd.init()
torch.manual_seed(42)
device = torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda", hvd.local_rank())
train_set, test_set = digits()
train_set = Subset(train_set, range(192))
train_sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), shuffle=False)
train_loader = DataLoader(train_set, batch_size=8, sampler=train_sampler)
test_sampler = DistributedSampler(test_set, hvd.size(), hvd.rank(), shuffle=False)
test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3)
        self.first, self.second = nn.Linear(72, 32), nn.Linear(32, 10)

    def forward(self, images):
        x = F.relu(F.max_pool2d(self.convolution(images), 2))
        return self.second(F.relu(self.first(x.flatten(1))))


model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(2):
    model.train()
    train_sampler.set_epoch(epoch)
    for images, targets in train_loader:
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
    model.eval()
    correct = torch.tensor(0.0)
    with torch.no_grad():
        for images, targets in test_loader:
            correct += (model(images.to(device)).argmax(1).cpu() == targets).sum()
    top1 = hvd.allreduce(correct / len(test_sampler), name="top1").item()
    if hvd.rank() == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}  top1 {top1:.4f}")
if hvd.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
