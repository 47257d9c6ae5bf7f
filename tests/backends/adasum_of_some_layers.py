"""A rank of mpirun: Adasum where each rank uses one layer, and the last layer is used by none."""

import copy
import sys

import torch
from torch import nn

import hpctrain

with hpctrain.Session(
    backend="horovod", horovod={"op": "adasum"}, batch_size=2, precision="fp64", timeout=30
) as session:
    rank, size = session.world.rank, session.world.world_size
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(size + 1)).double()
    alone = copy.deepcopy(layers)
    layers, _ = session.prepare(layers, torch.optim.AdamW(layers.parameters(), 0.1))
    optimizer = torch.optim.AdamW(alone.parameters(), 0.1)
    inputs = torch.ones(3, 2, dtype=torch.float64)
    for _ in range(3):
        session.step(layers[rank](inputs).square().mean())
        # No two ranks change the same layer, so the sum has the steps of all.
        torch.stack([layer(inputs).square().mean() for layer in alone[:-1]]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(layers.parameters(), alone.parameters(), strict=True)
    )
    sys.stdout.write(f"rank {rank} {difference:g}\n")
