"""A language model with batches drawn by hand, accumulation and a best checkpoint."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import hpctrain

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
    return windows[:, :-1].to(session.device), windows[:, 1:].to(session.device)


@torch.no_grad()
def evaluate(model):
    x, y = draw(val_text, torch.Generator().manual_seed(0))
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()


def rate(step, warmup=4, most=1e-2, least=1e-3):
    if step < warmup:
        return most * (step + 1) / warmup
    return least + (most - least) * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))) / 2


args = hpctrain.options().parse_args()
with hpctrain.Session(args, batch_size=8, accumulate=ACCUMULATE, seed=1337) as session:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = session.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1337 + session.world.rank)
    best = {"val_loss": math.inf}
    with session.run(state={"generator": generator, "best": best}) as run:
        for step in run.steps(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            x, y = draw(train_text, generator)
            with session.autocast():
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            session.backward(loss)
            session.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if session.sync_gradients and (step + 1) % 5 == 0:
                val_loss = evaluate(model)
                run.log(val_loss=val_loss)
                if val_loss < best["val_loss"]:
                    best["val_loss"] = val_loss
                    if session.is_main:
                        torch.save(model.state_dict(), "best.pt")
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
