"""The training of examples/simclr.py in plain torch, in one process."""

import torch
import torch.nn.functional as F


def nt_xent(first, second, temperature=0.5):
    """Return SimCLR's loss over all pairs of a batch (arXiv 2002.05709, algorithm 1)."""
    rows = torch.cat([first, second])
    alike = F.cosine_similarity(rows[:, None], rows[None], dim=2) / temperature
    positives = torch.cat([alike.diagonal(len(first)), alike.diagonal(-len(first))])
    others = alike[~torch.eye(len(rows), dtype=torch.bool)].view(len(rows), -1)
    return (others.logsumexp(1) - positives).mean()


def train(model, batches, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for first, second in batches:
        loss = nt_xent(model(first), model(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
