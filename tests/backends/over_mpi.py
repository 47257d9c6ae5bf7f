"""A rank of mpirun: Adasum by hpctrain and by Horovod's own optimizer, from the same weights."""

import copy
import sys

import torch
from torch import nn

import hpctrain

with hpctrain.Session(
    backend="horovod", horovod={"op": "adasum"}, batch_size=2, precision="fp64"
) as session:
    import horovod.torch as hvd

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    hand = copy.deepcopy(model)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(hand.parameters(), 0.1, momentum=0.9),
        named_parameters=hand.named_parameters(),
        op=hvd.Adasum,
    )
    torch.manual_seed(session.world.rank)
    for _ in range(5):
        inputs = torch.randn(4, 8, dtype=torch.float64)
        session.step(model(inputs).square().mean())
        hand(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), hand.parameters(), strict=True)
    )
    if session.is_main:
        sys.stdout.write(f"{session.backend.transport} {difference:g}\n")
try:
    hpctrain.Session(backend="horovod", batch_size=2)
except hpctrain.HpctrainError as error:
    sys.stdout.write(f"second: {error.found}\n")
