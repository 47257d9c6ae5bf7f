"""A language model with batches drawn by hand, accumulation and a best checkpoint; torchrun."""

import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ACCUMULATE, CONTEXT = 20, 2, 16
text = torch.randint(0, 24, (600,), generator=torch.Generator().manual_seed(7)).repeat(4)
train_text, val_text = text[:2000], text[2000:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(24, 32), nn.Embedding(CONTEXT, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        embedded = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.head(self.block(embedded, mask, is_causal=True))


def draw(source, generator):
    starts = torch.randint(len(source) - CONTEXT - 1, (8,), generator=generator)
    windows = torch.stack([source[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1].to(device), windows[:, 1:].to(device)


@torch.no_grad()
def evaluate(model):
    x, y = draw(val_text, torch.Generator().manual_seed(0))
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()


def rate(step, warmup=4, most=1e-2, least=1e-3):
    if step < warmup:
        return most * (step + 1) / warmup
    return least + (most - least) * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))) / 2


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(1337)
raw_model = GPT().to(device)
model = DistributedDataParallel(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
generator = torch.Generator().manual_seed(1337 + rank)
best = math.inf
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for micro in range(ACCUMULATE):
        x, y = draw(train_text, generator)
        with contextlib.nullcontext() if micro == ACCUMULATE - 1 else model.no_sync():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATE
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 5 == 0 and rank == 0:
        val_loss = evaluate(raw_model)
        print(f"step {step + 1}  loss {loss.item() * ACCUMULATE:.4f}  val_loss {val_loss:.4f}")
        if val_loss < best:
            best = val_loss
            torch.save(raw_model.state_dict(), "best.pt")
if rank == 0:
    torch.save(raw_model.state_dict(), "model.pt")
dist.destroy_process_group()
