"""Cost of a training step over the baseline, for hpctrain and for other libraries.

    python benchmarks/step_overhead.py [--rounds 300] [--steps 20] [--backend NAME] [--save FILE]

The model is so small that a step takes about a millisecond. It runs on CPUs in one process, in two
over gloo, and in two over Horovod, if Horovod is installed. The arms (see loops.py, also for what
each logs) take turns in the same processes, a short block of steps each. Each block is compared
with the baseline's block of the same round, so other load on the machine affects both. The targets
are for elapsed time. CPU time is also shown, because other jobs hardly change it.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from loops import ARMS, BASE, BATCH, LOG_EVERY, Setup, data, missing
from measure import add_save, describe, facts, order, outcome, save, summary, table

import hpctrain

TARGET_RATIO, TARGET_US = 1.02, 15.0
# Name: number of ranks, backend.
WORLDS = {
    "one process": (1, "single"),
    "two processes, gloo": (2, "ddp"),
    "two processes, Horovod": (2, "horovod"),
}
Times = dict[str, list[tuple[float, float]]]


def block(loop: Iterator[None], steps: int) -> tuple[float, float]:
    """Return microseconds per step over a block: elapsed time, and CPU time of all threads."""
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in range(steps):
        next(loop)
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    return clock / steps * 1e6, cpu / steps * 1e6


def take_turns(session: hpctrain.Session, rounds: int, steps: int, folder: Path) -> Times:
    """Return each arm's elapsed time and CPU time per step, one pair per round."""
    # One epoch holds all blocks and the warm-up, so no block contains the end of an epoch.
    dataset = data((rounds + 2) * steps * session.batches.global_batch)
    unavailable = missing(session.backend.name)
    setup = Setup(session, dataset, folder, steps)
    loops = {name: arm.loop(setup) for name, arm in ARMS.items() if name not in unavailable}
    times: Times = {name: [] for name in loops}
    for loop in loops.values():
        block(loop, steps)  # warms up
    for number in range(rounds):
        for name in order(list(loops), number):
            session.backend.barrier()
            times[name].append(block(loops[name], steps))
    for loop in loops.values():
        loop.close()
    return times


def rank_main(arguments: argparse.Namespace) -> None:
    """Run one rank; rank 0 writes the times."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        hpctrain.Session(
            run_dir=f"{arguments.rank_of}.run",
            backend=arguments.backend,
            batch_size=BATCH,
            log_every=LOG_EVERY,
            epochs=1,
        ) as session,
    ):
        times = take_turns(session, arguments.rounds, arguments.steps, Path(folder))
        if session.is_main:
            Path(arguments.rank_of).write_text(json.dumps(times))


def start(size: int, backend: str, arguments: argparse.Namespace, folder: str) -> Times:
    """Start the ranks of one world, and return the times that rank 0 wrote."""
    result = Path(folder) / f"{backend}.json"
    launcher = ["-m", "hpctrain", "run", "--nproc-per-node", str(size)] if size > 1 else []
    command = [
        sys.executable, *launcher, __file__, "--rank-of", str(result), "--backend", backend,
        "--rounds", str(arguments.rounds), "--steps", str(arguments.steps),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{size} ranks ended with exit code {done.returncode}")
    return json.loads(result.read_text())


def evaluate(times: Times) -> dict[str, dict[str, Any]]:
    """Return each arm's time per step, and block by block its ratio to the baseline."""
    results = {}
    base_clock, base_cpu = zip(*times[BASE], strict=True)
    for name, blocks in times.items():
        clock, cpu = zip(*blocks, strict=True)
        result = {
            "us": summary(clock),
            "ratio": summary([a / b for a, b in zip(clock, base_clock, strict=True)]),
            "more_us": summary([a - b for a, b in zip(clock, base_clock, strict=True)]),
            "cpu_us": summary(cpu),
            "more_cpu_us": summary([a - b for a, b in zip(cpu, base_cpu, strict=True)]),
        }
        if ARMS[name].has_target:
            result["targets"] = {
                key: {"limit": limit, "outcome": outcome(result[key], limit)}
                for key, limit in (("ratio", TARGET_RATIO), ("more_us", TARGET_US))
            }
        results[name] = result
    return results


def show(world: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the results of one world as a text table."""
    rows = [(world, "µs per step", "× baseline", "µs more", "µs more, processor")]
    outcomes = []
    for name, result in results.items():
        cells = (
            describe(result["ratio"], ".3f"),
            describe(result["more_us"]),
            describe(result["more_cpu_us"]),
        )
        rows.append((name, describe(result["us"]), *(cells if name != BASE else ("", "", ""))))
        if "targets" in result:
            ratio, more = result["targets"]["ratio"], result["targets"]["more_us"]
            outcomes.append(f"{name}: at most × {ratio['limit']:g}: {ratio['outcome']}")
            outcomes.append(f"{name}: at most {more['limit']:g} µs more: {more['outcome']}")
    return "\n".join([table(rows), *outcomes, ""])


def main() -> None:
    """Measure every world, print, save."""
    parser = argparse.ArgumentParser(description="The cost of a step over the baseline.")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="default: 300")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps per block (20)")
    add_save(parser)
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--backend",
        choices=[backend for _, backend in WORLDS.values()],
        help="measure only this backend",
    )
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments)
        return
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    if arguments.steps < 1 or arguments.steps % LOG_EVERY:
        parser.error(f"--steps: whole multiples of {LOG_EVERY}, so that all blocks log alike")
    peers = ["accelerate", "lightning-fabric", "pytorch-ignite"]
    record = facts(["hpctrain", "torch", "horovod", *peers])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for world, (size, backend) in WORLDS.items():
            if arguments.backend not in (None, backend):
                continue
            if backend == "horovod" and importlib.util.find_spec("horovod") is None:
                print(f"{world}: left out, because it is not installed: hpctrain horovod build\n")
                continue
            results[world] = evaluate(start(size, backend, arguments, folder))
            print(show(world, results[world]))
            for name, reason in missing(backend).items():
                print(f"{name}: left out: {reason}")
            print(flush=True)
    print("Medians over blocks, with their 95 % intervals; ratios and differences block by block.")
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "batch_size": BATCH}
    save(arguments.save, {"benchmark": "step_overhead", **record, **settings, "results": results})


if __name__ == "__main__":
    main()
