"""A small GPT that learns to continue a text, character by character."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hpctrain


def options():
    parser = hpctrain.options(recipe=True, description=__doc__)
    # The errors that hpctrain explains are the default text, which is there without a download.
    text = Path(hpctrain.__file__).with_name("errors") / "codes.toml"
    parser.set_defaults(lr=1e-2, decay="weights")
    parser.set_defaults(lr_warmup_steps=20, lr_schedule="cosine", lr_min=1e-3, clip_norm=1.0)
    group = parser.add_argument_group("options of this example")
    about = "text file, or folder of .md and .txt files (the errors of hpctrain)"
    group.add_argument("--data", default=str(text), metavar="PATH", help=about)
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


class GPT(nn.Module):
    def __init__(self, characters, context, width=64, layers=2):
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(context, width)
        heads = max(4, width // 64)
        sizes = {"d_model": width, "nhead": heads, "dim_feedforward": 4 * width, "dropout": 0.0}
        kind = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, **kind) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        later = places > places[:, None]  # no character sees those behind it
        features = self.character(tokens) + self.place(places)
        for layer in self.layers:
            features = layer(features, src_mask=later, is_causal=True)
        return self.head(self.norm(features))


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
    with hpctrain.Session(args) as session:
        text = read(args.data)
        characters = sorted(set(text))
        tokens = torch.tensor([characters.index(one) for one in text], device=session.device)
        train, test = tokens.tensor_split([len(tokens) * 9 // 10])
        size = args.context + 1
        test_loader = session.loader(test.unfold(0, size, size).cpu(), train=False)
        model = GPT(len(characters), args.context, args.width, args.layers)
        optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.1)
        model, optimizer = session.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(session.options.seed)

        with session.run(state={"generator": generator}) as run:
            for _ in run.steps(200):
                pieces = draw(session, train, args.context, generator)
                with session.autocast():
                    loss = loss_of(model, pieces)
                ended = session.step(loss)  # False while micro-batches accumulate
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
