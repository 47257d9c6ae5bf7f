"""Tokens per second when training a GPT of about 1B parameters with FSDP: hpctrain and by hand.

    python benchmarks/gpt.py [--rounds 8] [--steps 4] [--only NAME …] [--save FILE]

One rank on one GPU trains a model of 1.1 · 10⁹ parameters in bf16 over fp32 weights, with a fused
AdamW and clipping by the norm. The loop by hand calls `fully_shard` on the same blocks of the same
model. Both take turns in one process. Each case has a process of its own: the model as it is, with
torch.compile, and in fp8 (torchao) with torch.compile. In the last case the loop by hand stays in
bf16, so the ratio is the gain of fp8. The arithmetic of the GPU is counted as 6 · parameters ·
tokens, without attention.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Results, compare, restart, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hpctrain
from hpctrain.tools.bench.measure import take_turns
from hpctrain.tools.bench.step import Step, by_hand, with_session
from hpctrain.tools.bench.turns import timed

BASE, OURS = "by hand, fully_shard", "hpctrain, fsdp"
CASES = {"bf16": ("bf16", False), "compiled": ("bf16", True), "fp8, compiled": ("fp8", True)}


class GPT(nn.Module):
    """A transformer in which no token sees later ones, without dropout."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        sizes = {"d_model": width, "nhead": heads, "dim_feedforward": 4 * width}
        kind = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, **kind) for _ in range(layers)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next word, of shape (batch, length, words)."""
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        features = self.words(tokens)
        for layer in self.layers:
            features = layer(features, src_mask=later, is_causal=True)
        scores: Tensor = self.head(features)
        return scores


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def steps(
    session: hpctrain.Session,
    make: Callable[[], GPT],
    rate: float,
    tokens: Tensor,
    half: torch.dtype | None,
) -> dict[str, Step]:
    """Return the step of each arm: with torch alone, and with hpctrain.

    Args:
        session: open session over fsdp that clips by a norm of 1.
        make: returns a new model with the same weights.
        rate: learning rate.
        tokens: samples on the device, each one longer than what the model sees.
        half: type of the loop by hand; None for fp32.
    """

    def adamw(model: GPT) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), rate, fused=tokens.is_cuda)

    batches = itertools.repeat((tokens[:, :-1], tokens[:, 1:]))
    mesh = init_device_mesh(tokens.device.type, (session.world.world_size,))
    policy = MixedPrecisionPolicy(half, half and torch.float32)
    base, own = make(), make()
    for layer in base.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(base, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if session.options.compile:
        base.compile()
    return {
        BASE: by_hand(session.device, base, adamw(base), batches, half, loss_of, clip=1.0),
        OURS: with_session(session, own, adamw(own), batches, loss_of),
    }


def rank(arguments: argparse.Namespace) -> Any:
    """Return the tokens per second of each arm, and the parameters of the model."""
    precision, compiled = CASES[arguments.case]
    settings = {"precision": precision, "compile": compiled, "clip_norm": 1.0}
    size, length = arguments.batch_size, arguments.length
    with hpctrain.Session(backend="fsdp", batch_size=size, **settings) as session:
        tokens = torch.randint(arguments.words, (size, length + 1), device=session.device)

        def make() -> GPT:
            torch.manual_seed(0)
            with session.device:
                width = arguments.width
                return GPT(arguments.words, width, arguments.layers, width // 128)

        arms = {
            name: partial(timed, session.device, step, arguments.steps)
            for name, step in steps(session, make, 1e-5, tokens, torch.bfloat16).items()
        }
        times = take_turns(arms, arguments.rounds, warm_up=2)
        rates = {
            name: [{"tokens_per_s": size * length / one} for one in own]
            for name, own in times.items()
        }
        return {"rates": rates, "parameters": sum(p.numel() for p in make().parameters())}


def measure(arguments: argparse.Namespace) -> Results:
    """Return the tokens per second of each case."""
    results: Results = {}
    for case in arguments.only or CASES:
        found = restart(arguments, case=case)
        targets = {OURS: {"ratio": "≥ 0.99"}} if CASES[case][0] == "bf16" else {}
        results[case] = compare(found["rates"], BASE, targets=targets)
        for arm in results[case].values():
            arm["tflops"] = 6e-12 * found["parameters"] * arm["tokens_per_s"]["median"]
    return results


def number(default: int, what: str) -> dict[str, Any]:
    """Return the arguments of an option that is a number."""
    return {"type": int, "default": default, "metavar": "N", "help": f"{what} ({default})"}


OPTIONS: dict[str, dict[str, Any]] = {
    "--steps": number(4, "steps of a block"),
    "--width": number(2048, "width of the model"),
    "--layers": number(20, "layers"),
    "--words": number(32768, "words it knows"),
    "--length": number(1024, "tokens of a sample"),
    "--batch-size": number(8, "samples"),
    "--only": {"nargs": "+", "choices": CASES, "metavar": "NAME", "help": "default: all"},
    "--case": {"default": "bf16", "help": argparse.SUPPRESS},
}

if __name__ == "__main__":
    packages = ["hpctrain", "torch"]
    run("A GPT with FSDP, against by hand.", 8, packages, measure, OPTIONS, rank, of_gpu=True)
