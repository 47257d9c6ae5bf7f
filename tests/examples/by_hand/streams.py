"""The training of examples/streams.py in plain torch: one process has the streams of all ranks.

A step takes a batch of each stream, and an epoch ends with the shortest stream.
"""

import random

import torch
import torch.nn.functional as F


def stream(files, seed, epoch, rank, ranks, size):
    """Yield the whole batches of the files of one rank."""
    draw = random.Random(f"{seed} {epoch}")
    lines = []
    for file in draw.sample(files, len(files))[rank::ranks]:
        text = file.read_text().splitlines()
        lines += draw.sample(text, len(text))
    rows = torch.tensor([[int(number) for number in line.split(",")] for line in lines])
    for begin in range(0, len(rows) - size + 1, size):
        yield rows[begin : begin + size]


def train(model, files, ranks, batch, epochs, seed, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for epoch in range(epochs):
        streams = [stream(files, seed, epoch, rank, ranks, batch // ranks) for rank in range(ranks)]
        for parts in zip(*streams, strict=False):
            rows = torch.cat(parts)
            loss = F.cross_entropy(model(rows[:, 1:] / torch.tensor(16.0).double()), rows[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
