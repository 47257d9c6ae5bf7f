"""The training of examples/language_model.py in plain torch, in one process."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CLIP, DECAY = 1.0, 0.1


def rate(step, steps, warmup, highest, least):
    if step < warmup:
        return highest * (step + 1) / warmup
    part = (step - warmup) / (steps - warmup)
    return least + (highest - least) * (1 + math.cos(math.pi * part)) / 2


def train(model, tokens, context, batch, seed, steps, warmup, highest, least):
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, highest)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, warmup, highest, least)
        starts = torch.randint(len(tokens) - context, (batch,), generator=generator)
        x = torch.stack([tokens[start : start + context] for start in starts])
        y = torch.stack([tokens[start + 1 : start + 1 + context] for start in starts])
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
