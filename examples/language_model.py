"""A small GPT that learns to continue a text, character by character."""

import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hpctrain


def options():
    parser = hpctrain.options(description=__doc__)
    # The errors that hpctrain explains are the default text, which is there without a download.
    text = Path(hpctrain.__file__).with_name("errors") / "codes.toml"
    group = parser.add_argument_group("options of this example")
    about = "text file, or folder of .md and .txt files (the errors of hpctrain)"
    group.add_argument("--data", default=str(text), metavar="PATH", help=about)
    group.add_argument("--lr", type=float, default=1e-2, metavar="X", help="(%(default)s)")
    about = "steps in which the learning rate grows (%(default)s)"
    group.add_argument("--warmup", type=int, default=20, metavar="STEPS", help=about)
    about = "learning rate at the end (%(default)s)"
    group.add_argument("--lr-end", type=float, default=1e-3, metavar="X", help=about)
    group.add_argument(
        "--context", type=int, default=32, metavar="N", help="characters it sees (%(default)s)"
    )
    group.add_argument("--width", type=int, default=64, metavar="N", help="(%(default)s)")
    group.add_argument("--layers", type=int, default=2, metavar="N", help="(%(default)s)")
    group.add_argument("--eval-every", type=int, default=50, metavar="STEPS", help="(%(default)s)")
    return parser


def read(path):
    """Return the text of a file, or of the .md and .txt files of a folder."""
    path = Path(path)
    files = sorted([*path.glob("*.md"), *path.glob("*.txt")]) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


class Block(nn.Module):
    """Attention of each character to those before it, and a perceptron."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Linear layers, as a whole nn.MultiheadAttention is out of reach of fp8.
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, features):
        normal = self.norm1(features)
        q, k, v = (
            layer(normal).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        features = features + self.out(mixed.transpose(1, 2).flatten(2))
        return features + self.perceptron(self.norm2(features))


class GPT(nn.Module):
    def __init__(self, characters, context, width=64, layers=2):
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, max(4, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.character(tokens) + self.place(places)
        for layer in self.layers:
            features = layer(features)
        return self.head(self.norm(features))


def optimizer_of(model, lr):
    """Return AdamW, with weight decay for matrices alone: not for norms and biases."""
    some = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": some, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr)


def rate(step, warmup, steps, end):
    """Return the factor of the learning rate: up in a line, then down to `end` in half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    part = min(1.0, (step - warmup) / max(1, steps - warmup))
    return end + (1 - end) * (1 + math.cos(math.pi * part)) / 2


def draw(session, tokens, context, generator):
    """Return random pieces of the text, of shape (batch size, context + 1).

    All ranks draw the places of all ranks, and each takes its own row. So a step has the same
    pieces on any number of ranks.
    """
    world, size = session.world, session.batches.batch_size
    starts = torch.randint(len(tokens) - context, (world.world_size, size), generator=generator)
    places = starts[world.rank, :, None] + torch.arange(context + 1)
    return tokens[places.to(tokens.device)]


def loss_of(model, pieces):
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def evaluate(session, model, loader):
    model.eval()
    total = count = 0
    with torch.no_grad(), session.autocast():
        for pieces in loader:
            total += loss_of(model, pieces).item() * len(pieces)
            count += len(pieces)
    model.train()
    total, count = session.sum(total, count)
    return total / count


def continued(session, model, tokens, context, generator):
    """Return tokens (length,) and 300 more, each drawn by the model."""
    model.eval()
    with torch.no_grad(), session.autocast():
        for _ in range(300):
            likely = model(tokens[None, -context:])[0, -1].float().softmax(0).cpu()
            tokens = torch.cat([tokens, likely.multinomial(1, generator=generator).to(tokens)])
    return tokens


def main():
    args = options().parse_args()
    with hpctrain.Session(args, clip_norm=1.0) as session:
        text = read(args.data)
        characters = sorted(set(text))
        tokens = torch.tensor([characters.index(one) for one in text], device=session.device)
        train, test = tokens.tensor_split([len(tokens) * 9 // 10])
        size = args.context + 1
        test_loader = session.loader(test.unfold(0, size, size).cpu(), train=False)
        model = GPT(len(characters), args.context, args.width, args.layers)
        model, optimizer = session.prepare(model, optimizer_of(model, args.lr))
        steps = args.max_steps or 200
        sizes = {"warmup": args.warmup, "steps": steps, "end": args.lr_end / args.lr}
        schedule = session.prepare(LambdaLR(optimizer, partial(rate, **sizes)))
        generator = torch.Generator().manual_seed(session.options.seed)

        with session.run(state={"generator": generator}) as run:
            for _ in run.steps(steps):
                pieces = draw(session, train, args.context, generator)
                with session.autocast():
                    loss = loss_of(model, pieces)
                ended = session.step(loss)  # False while micro-batches accumulate
                schedule.step()
                run.log(loss=loss)
                if ended and run.step % args.eval_every == 0:
                    run.log(eval_loss=evaluate(session, model, test_loader))
        # --resume on a finished run leaves the loop out, and prints the same sample again.
        # All ranks compute it: with --backend fsdp, each of them has a part of the weights.
        sample = continued(session, model, test[:20], args.context, generator)
        if session.is_main:
            print("".join(characters[number] for number in sample.tolist()))


if __name__ == "__main__":
    main()
