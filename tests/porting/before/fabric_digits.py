"""Digits with Lightning Fabric, which saves after each epoch and goes on from there."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset

from hpctrain.data import digits

devices = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="auto", devices=devices, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
train_set, test_set = digits()
train_loader = DataLoader(Subset(train_set, range(192)), batch_size=8)
test_loader = DataLoader(Subset(test_set, range(96)), batch_size=16)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
model, optimizer = fabric.setup(model, optimizer)
train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if Path("checkpoint.ckpt").exists():
    fabric.load("checkpoint.ckpt", state)

for epoch in range(state["epoch"], 2):
    for step, (images, targets) in enumerate(train_loader):
        last = step % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(images), targets)
            fabric.backward(loss / 2)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    correct = torch.tensor(0.0, device=fabric.device)
    with torch.no_grad():
        for images, targets in test_loader:
            correct += (model(images).argmax(1) == targets).sum()
    correct = fabric.all_reduce(correct, reduce_op="sum")
    fabric.print(f"epoch {epoch}  loss {loss.item():.4f}  top1 {correct.item() / 96:.4f}")
    state["epoch"] = epoch + 1
    fabric.save("checkpoint.ckpt", state)
fabric.barrier()
if fabric.is_global_zero:
    torch.save(model.state_dict(), "model.pt")
