"""Digits, saved after each epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import hpctrain
from hpctrain.data import digits

args = hpctrain.options().parse_args()
with hpctrain.Session(args, accumulate=2) as session:
    train_set, test_set = digits()
    train_loader = DataLoader(Subset(train_set, range(192)), batch_size=8)
    test_loader = DataLoader(Subset(test_set, range(96)), batch_size=16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    model, optimizer = session.prepare(model, optimizer)
    train_loader, test_loader = session.prepare(train_loader, test_loader)

    with session.run() as run:
        for _ in run.epochs(2):
            for images, targets in run.batches(train_loader):
                with session.autocast():
                    loss = F.cross_entropy(model(images), targets)
                session.backward(loss)
                session.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
            correct = torch.tensor(0.0, device=session.device)
            with torch.no_grad():
                for images, targets in test_loader:
                    correct += (model(images).argmax(1) == targets).sum()
            correct = session.all_reduce(correct)
            run.log(top1=correct / 96)
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
