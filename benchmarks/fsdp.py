"""Benchmark of FSDP: a step against a loop by hand, and what a rank holds against ddp.

    python benchmarks/fsdp.py [--rounds 40] [--steps 5] [--save FILE]

Four ranks over gloo on one host train a transformer of eight layers. The loop by hand calls
`fully_shard` on the same blocks of the same model, clips by the norm, and logs every ten steps.
Both take turns in the same processes. A rank's bytes are those of its weights, gradients and
AdamW's states after a step; the target allows for the largest block, which is gathered for a time.
"""

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from harness import Results, by_figure, clocked, compare, judge, restart, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hpctrain
from hpctrain.tools.bench.measure import summary, take_turns

RANKS, LAYERS, WIDTH, LENGTH, BATCH, WORDS = 4, 8, 128, 32, 4, 512
BASE, OURS = "by hand, fully_shard", "hpctrain, fsdp"
TARGETS = {OURS: {"ratio": "≤ 1.02"}}


class Transformer(nn.Module):
    """A transformer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        sizes = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next word, of shape (batch, length, words)."""
        features = self.words(tokens)
        for layer in self.layers:
            features = layer(features)
        scores: Tensor = self.head(features)
        return scores


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def by_hand(model: Transformer, tokens: Tensor, ranks: int) -> Iterator[None]:
    """Train with torch alone."""
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    losses = []
    while True:
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == 10:
            torch.stack(losses).mean().item()
            losses.clear()
        yield


def ours(session: hpctrain.Session, model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Train with hpctrain."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    model, _ = session.prepare(model, optimizer)
    losses = []
    while True:
        loss = loss_of(model, tokens)
        session.step(loss)
        losses.append(loss.detach())
        if len(losses) == 10:
            torch.stack(losses).mean().item()
            losses.clear()
        yield


def held(session: hpctrain.Session, tokens: Tensor) -> dict[str, int]:
    """Train a step; return the bytes of this rank, and of the largest block."""
    model = Transformer()
    block = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), 1e-4))
    session.backward(loss_of(model, tokens))
    own = session.backend.own_part
    gradients = sum(own(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    states = [value for one in optimizer.state.values() for value in one.values()]
    parts = [*model.parameters(), *(one for one in states if isinstance(one, Tensor))]
    return {"bytes": gradients + sum(own(one).nbytes for one in parts), "block": block}


def rank(arguments: argparse.Namespace) -> Any:
    """Run one rank; return the times of each arm, or the bytes that it holds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (BATCH, LENGTH))
    settings = {"backend": arguments.backend, "batch_size": BATCH, "clip_norm": 1.0}
    with hpctrain.Session(**settings) as session:
        if arguments.held:
            own = held(session, tokens)
            return own if session.is_main else None
        model = Transformer()
        loops = {
            BASE: by_hand(copy.deepcopy(model), tokens, session.world.world_size),
            OURS: ours(session, model, tokens),
        }
        arms = {
            name: partial(clocked, session, partial(next, loop), arguments.steps)
            for name, loop in loops.items()
        }
        take_turns(arms, 2)  # warms up
        times = take_turns(arms, arguments.rounds)
        return times if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the times of each arm, and the bytes of a rank."""
    times = by_figure(restart(arguments, RANKS))
    results: Results = {"a step": compare(times, BASE, targets=TARGETS)}
    fsdp, ddp = (restart(arguments, RANKS, held=True, backend=name) for name in ("fsdp", "ddp"))
    share, limit = fsdp["bytes"] / ddp["bytes"], 1 / RANKS + fsdp["block"] / ddp["bytes"]
    arm = {"share": summary([share]), "held_bytes": summary([fsdp["bytes"]])}
    judge(arm, "share", f"≤ {limit:.3f}")
    results["held by a rank"] = {"ddp": {"held_bytes": summary([ddp["bytes"]])}, OURS: arm}
    return results


OPTIONS: dict[str, dict[str, Any]] = {
    "--steps": {"type": int, "default": 5, "metavar": "N", "help": "of a block (5)"},
    "--held": {"action": "store_true", "help": argparse.SUPPRESS},
    "--backend": {"default": "fsdp", "help": argparse.SUPPRESS},
}

if __name__ == "__main__":
    run("The cost of FSDP.", 40, ["hpctrain", "torch"], measure, OPTIONS, rank)
