"""Time from the command to the first all-reduce, with two ranks over gloo, against torchrun.

    python benchmarks/first_allreduce.py [--rounds 8] [--save FILE]

The clock starts before the command and stops when both ranks have printed the sum. The end of the
command is not counted. The arms take turns. Each is compared with the baseline of its own round:
torchrun with a script that does not use hpctrain. Most of the time is spent on imports, so other
load on the machine slows all arms.
"""

import argparse
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import add_save, describe, facts, order, outcome, save, summary, table

RANKS = 2
TIMEOUT = 120.0
SUM_LINE = b"first all-reduce: 2.0"
BASELINE = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"first all-reduce: {tensor.item()}", flush=True)
dist.destroy_process_group()
"""
WITH_SESSION = """\
import torch

import hpctrain

with hpctrain.Session() as session:
    tensor = session.backend.sum(torch.ones(1))
    print(f"first all-reduce: {tensor.item()}", flush=True)
"""
SCRIPTS = {"baseline.py": BASELINE, "with_session.py": WITH_SESSION}
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(RANKS))
RUN = (sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", str(RANKS))
BASE = "torchrun, baseline"
TARGET_ARM, TARGET_RATIO = "hpctrain run, Session", 1.0
# To add an arm, add a line: its name and its command.
ARMS = {
    BASE: (*TORCHRUN, "baseline.py"),
    "torchrun, Session": (*TORCHRUN, "with_session.py"),
    TARGET_ARM: (*RUN, "with_session.py"),
    # --as torchrun gives the ranks the variables of torchrun, which env:// reads.
    "hpctrain run --as torchrun, baseline": (*RUN, "--as", "torchrun", "baseline.py"),
}


def seconds(command: tuple[str, ...], environment: dict[str, str], folder: str) -> float:
    """Return the seconds from before the start until each rank has printed its sum.

    Raises:
        SystemExit: a rank did not print its sum within the timeout, or the command failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        took = _watch(process, start)
        output, _ = process.communicate(timeout=TIMEOUT)
        if process.returncode:
            raise SystemExit(f"{output.decode()}\n{command} ended with {process.returncode}")
        return took
    finally:
        _end(process)


def _watch(process: subprocess.Popen[bytes], start: float) -> float:
    assert process.stdout is not None
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, start + TIMEOUT - time.perf_counter())):
            data = os.read(process.stdout.fileno(), 1 << 16)
            output += data
            if output.count(SUM_LINE) == RANKS:
                return time.perf_counter() - start
            if not data:
                break
    raise SystemExit(f"{output.decode()}\nno sum from each rank within {TIMEOUT:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a start that hangs or failed."""
    if process.poll() is None:
        process.terminate()  # launchers end their ranks, which have process groups of their own
        try:
            process.wait(40)  # torchrun gives its ranks 30 s
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the times of each arm, one per round."""
    # Without bytecode caches, the time would include the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            (Path(folder) / name).write_text(text)
        for command in ARMS.values():  # warms up: writes the caches, loads the files into memory
            seconds(command, environment, folder)
        for number in range(rounds):
            for name in order(list(ARMS), number):
                times[name].append(seconds(ARMS[name], environment, folder))
    return times


def evaluate(times: dict[str, list[float]]) -> dict[str, dict]:
    """Return for each arm its time, and its ratio to the base of the same round."""
    results: dict[str, dict] = {}
    for name, own in times.items():
        results[name] = {"s": summary(own), "all_s": own}
        if name == BASE:
            continue
        ratio = summary([a / b for a, b in zip(own, times[BASE], strict=True)])
        results[name]["ratio"] = ratio
        if name == TARGET_ARM:
            results[name] |= {"target": TARGET_RATIO, "outcome": outcome(ratio, TARGET_RATIO)}
    return results


def show(results: dict[str, dict]) -> str:
    """Return the results as a text table."""
    rows = [("", "s", f"× {BASE}", "target", "")]
    for name, result in results.items():
        ratio, target = result.get("ratio"), result.get("target")
        rows.append(
            (
                name,
                describe(result["s"], ".2f"),
                describe(ratio, ".3f") if ratio else "",
                f"≤ {target:g}" if target else "",
                result.get("outcome", ""),
            )
        )
    return table(rows) + "\nMedians, with their 95 % intervals; ratios round by round."


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="From the command to the first all-reduce.")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: 8")
    add_save(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    record = facts(["hpctrain", "torch"])
    results = evaluate(measure(arguments.rounds))
    print(show(results))
    save(arguments.save, {"benchmark": "first_allreduce", **record, "results": results})


if __name__ == "__main__":
    main()
