"""What all benchmark programs share: command line, ranks, comparison, table and result file."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import add_save, facts, named, outcome, outcomes, save

from hpctrain.tools.bench import measure as bench
from hpctrain.tools.bench.measure import Results, rows, table

__all__ = [
    "ENVIRONMENT",
    "Results",
    "clocked",
    "compare",
    "judge",
    "restart",
    "run",
    "start",
]

# Without bytecode caches, the time of a new process would include the compiler.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def run(
    description: str,
    rounds: int | None,
    packages: Sequence[str],
    measure: Callable[[argparse.Namespace], Results],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    rank: Callable[[argparse.Namespace], Any] | None = None,
    of_gpu: bool = False,
) -> None:
    """Run a benchmark program: parse the command line, measure, print and save.

    Args:
        description: description for `--help`.
        rounds: default number of rounds; None without the option `--rounds`.
        packages: packages whose versions are recorded.
        measure: returns the results.
        options: further options, each with its arguments of `add_argument`.
        rank: main function of a rank that `start` starts; rank 0 writes what it returns.
        of_gpu: whether figures of a CPU are no results.
    """
    parser = argparse.ArgumentParser(description=description)
    if rounds:
        parser.add_argument(
            "--rounds", type=_count, default=rounds, metavar="N", help="default: %(default)s"
        )
    for name, settings in (options or {}).items():
        parser.add_argument(name, **settings)
    add_save(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if rank and arguments.json:
        result = rank(arguments)
        if result is not None:
            arguments.json.write_text(json.dumps(result))
        return
    if of_gpu and arguments.save and not _gpu():
        raise SystemExit("--save: torch finds no GPU, and figures of a CPU are no results here")
    record = {"benchmark": Path(parser.prog).stem, **facts(packages)}
    record |= _gpu() | {k: v for k, v in vars(arguments).items() if k not in ("save", "json")}
    record["results"] = measure(arguments)
    print(table(rows(named(record))))
    for subject, figure, target, reached in outcomes(record):
        print(f"{subject}: {figure}, target {target}: {reached}")
    print("Medians over rounds, with 95 % intervals; ratios and differences round by round.")
    save(arguments.save, record)


def _gpu() -> dict[str, str]:
    """Return the name of the GPU, if the program has imported torch and it finds one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch and torch.cuda.is_available() else {}


def _count(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("a spread needs two rounds or more")
    return int(text)


def start(*program: str, ranks: int = 1, **variables: str) -> Any:
    """Run a Python program on some ranks; return what rank 0 wrote to the file of `--json`.

    Args:
        program: arguments of the interpreter.
        ranks: number of ranks on this machine.
        variables: further environment variables.
    """
    launcher = ["-m", "hpctrain", "run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        done = subprocess.run(
            [sys.executable, *launcher, *program, "--json", str(path)],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{shlex.join(program)}: exit code {done.returncode}")
        return json.loads(path.read_text())


def restart(arguments: argparse.Namespace, ranks: int = 1, **changed: Any) -> Any:
    """Start this program again on some ranks, with its options; return what rank 0 wrote.

    Args:
        arguments: parsed command line.
        ranks: number of ranks on this machine.
        changed: options that have other values.
    """
    words = []
    for name, value in {**vars(arguments), **changed, "save": None, "json": None}.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return start(sys.argv[0], *words, ranks=ranks)


def clocked(
    session: Any, call: Callable[[], Any], calls: int = 1, unit: str = "ms"
) -> dict[str, float]:
    """Time calls that begin on all ranks at once.

    Args:
        session: open session.
        call: function to call.
        calls: number of calls, one after the other.
        unit: `ms` or `us`.

    Returns:
        The mean elapsed time of a call, and its CPU time in this thread. Other threads, such as
        those of gloo and Horovod, wait actively for the other rank.
    """
    session.backend.barrier()
    cpu, clock = time.thread_time(), time.perf_counter()
    for _ in range(calls):
        call()
    clock, cpu = time.perf_counter() - clock, time.thread_time() - cpu
    scale = {"ms": 1e3, "us": 1e6}[unit] / calls
    return {unit: clock * scale, f"cpu_{unit}": cpu * scale}


def compare(
    rounds: Mapping[str, Sequence[Mapping[str, float]]],
    base: str,
    by: Sequence[str] = ("ratio",),
    targets: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Results]:
    """Compare arms as `hpctrain bench` does, and judge them.

    Args:
        rounds: figures of each arm in each round, as `take_turns` returns them.
        base: arm that the others are compared with.
        by: `ratio`, `more_FIGURE`, and `ratio_by_cpu`: the elapsed time of the base plus the added
            CPU time, over the elapsed time of the base.
        targets: by arm, the limit of a figure, such as `{"ratio": "≤ 1.02"}`.
    """
    series = {
        name: {figure: [one[figure] for one in own] for figure in own[0]}
        for name, own in rounds.items()
    }
    results = bench.compare(series, base, [key for key in by if key != "ratio_by_cpu"])
    for name, own in series.items() if "ratio_by_cpu" in by else ():
        elapsed, cpu, *_ = own  # names of figures
        of = series[base]
        triples = zip(own[cpu], of[cpu], of[elapsed], strict=True)
        ratios = [1 + (mine - theirs) / whole for mine, theirs, whole in triples]
        results[name]["ratio_by_cpu"] = bench.summary(ratios)
    for name, limits in (targets or {}).items():
        for key, limit in limits.items():
            judge(results[name], key, limit)
    return results


def judge(arm: Results, key: str, limit: str) -> None:
    """Add a target of a figure, such as ≤ 1.02 or ≥ 0.99, and its outcome to an arm."""
    sign, number = limit.split()
    figures, most = arm[key], float(number)
    if sign == "≥":
        figures = {"median": -figures["median"], "low": -figures["high"], "high": -figures["low"]}
        most = -most
    arm.setdefault("targets", {})[key] = {"limit": limit, "outcome": outcome(figures, most)}
