"""Benchmark of FSDP: a step against a loop by hand, and what a rank holds against ddp.

    python benchmarks/fsdp.py [--rounds 40] [--steps 5] [--save FILE]

Four ranks over gloo on one host train a GPT of eight layers (see gpt.py) in fp32. The loop by hand
calls `fully_shard` on the same blocks of the same model, and clips by the norm. Both take turns in
the same processes. A rank's bytes are those of its weights, gradients and AdamW's states after a
step; the target allows for the largest block, which is gathered for a time.
"""

import argparse
from functools import partial
from typing import Any

import torch
from gpt import BASE, GPT, OURS, loss_of, steps
from harness import Results, clocked, compare, judge, restart, run
from torch import Tensor

import hpctrain
from hpctrain.tools.bench.measure import summary, take_turns

RANKS, LAYERS, WIDTH, LENGTH, BATCH, WORDS = 4, 8, 128, 32, 4, 512
TARGETS = {OURS: {"ratio": "≤ 1.02"}}


def make() -> GPT:
    """Return a new model with the same weights each time."""
    torch.manual_seed(0)
    return GPT(WORDS, WIDTH, LAYERS, heads=4)


def held(session: hpctrain.Session, tokens: Tensor) -> dict[str, int]:
    """Train a step; return the bytes of this rank, and of the largest block."""
    model = make()
    block = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), 1e-4))
    session.backward(loss_of(model(tokens[:, :-1]), tokens[:, 1:]))
    part = session.backend.held
    gradients = sum(part(p.grad)[0].nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    states = [value for one in optimizer.state.values() for value in one.values()]
    parts = [*model.parameters(), *(one for one in states if isinstance(one, Tensor))]
    return {"bytes": gradients + sum(part(one)[0].nbytes for one in parts), "block": block}


def rank(arguments: argparse.Namespace) -> Any:
    """Run one rank; return the times of each arm, or the bytes that it holds."""
    torch.set_num_threads(1)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1))
    settings = {"backend": arguments.backend, "batch_size": BATCH, "clip_norm": 1.0}
    with hpctrain.Session(**settings) as session:
        if arguments.held:
            own = held(session, tokens)
            return own if session.is_main else None
        arms = {
            name: partial(clocked, session, step, arguments.steps)
            for name, step in steps(session, make, 1e-4, tokens, None).items()
        }
        times = take_turns(arms, arguments.rounds, warm_up=2)
        return times if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the times of each arm, and the bytes of a rank."""
    results: Results = {"a step": compare(restart(arguments, RANKS), BASE, targets=TARGETS)}
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
