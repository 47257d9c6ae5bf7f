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
from hpctrain.tools.bench.turns import timed

BASE, OURS = "by hand, fully_shard", "hpctrain, fsdp"
CASES = {"bf16": ("bf16", False), "compiled": ("bf16", True), "fp8, compiled": ("fp8", True)}


class GPT(nn.Module):
    """A transformer in which no token sees later ones, without dropout."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        sizes = {"d_model": width, "nhead": width // 128, "dim_feedforward": 4 * width}
        kind = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, **kind) for _ in range(layers)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, later: Tensor) -> Tensor:
        """Return the scores of the next word, of shape (batch, length, words)."""
        features = self.words(tokens)
        for layer in self.layers:
            features = layer(features, src_mask=later, is_causal=True)
        scores: Tensor = self.head(features)
        return scores


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    length = tokens.shape[1] - 1
    later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    scores = model(tokens[:, :-1], later)
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def by_hand(model: GPT, tokens: Tensor, compiled: bool) -> Callable[[], Tensor]:
    """Return a step with torch alone."""
    mesh = init_device_mesh(tokens.device.type, (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=tokens.is_cuda)

    def step() -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(session: hpctrain.Session, model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """Return a step with hpctrain."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=tokens.is_cuda)
    model, optimizer = session.prepare(model, optimizer)

    def step() -> Tensor:
        with session.autocast():
            loss = loss_of(model, tokens)
        session.step(loss, optimizer)
        return loss.detach()

    return step


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
                return GPT(arguments.words, arguments.width, arguments.layers)

        steps = {BASE: by_hand(make(), tokens, compiled), OURS: ours(session, make(), tokens)}
        arms = {
            name: partial(timed, session.device, step, arguments.steps)
            for name, step in steps.items()
        }
        take_turns(arms, 2)  # warms up
        times = take_turns(arms, arguments.rounds)
        rates = {name: [size * length / one for one in own] for name, own in times.items()}
        return {"rates": rates, "parameters": sum(p.numel() for p in make().parameters())}


def measure(arguments: argparse.Namespace) -> Results:
    """Return the tokens per second of each case."""
    results: Results = {}
    for case in arguments.only or CASES:
        found = restart(arguments, case=case)
        series = {name: {"tokens_per_s": rates} for name, rates in found["rates"].items()}
        targets = {OURS: {"ratio": "≥ 0.99"}} if CASES[case][0] == "bf16" else {}
        results[case] = compare(series, BASE, targets=targets)
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
