"""`hpctrain bench WHAT`: opens a session and measures; rank 0 prints and saves the results."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from hpctrain.cluster import visible_gpus
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.tools.bench import allreduce, step
from hpctrain.tools.bench.measure import Results, facts, rows, table
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["execute", "show"]

_TIMEOUT = 300.0  # of the session, in seconds

# Measure, and return the results at rank 0; all ranks must call this together.
_MEASUREMENTS: dict[str, Callable[[Session, argparse.Namespace], Results]] = {
    "step": step.measure,
    "allreduce": allreduce.measure,
}


def execute(arguments: argparse.Namespace) -> int:
    """Run a benchmark and return an exit code.

    Args:
        arguments: arguments of the command line.

    Raises:
        HpctrainError: an error at rank 0, or an error at another rank that rank 0 did not report.
        Stopped: a rank received a stop request.
    """
    measure = _MEASUREMENTS[arguments.what]
    try:
        with _open(arguments) as session:
            on_rank_zero(session.backend, lambda: _check_target(arguments.json))
            found = measure(session, arguments)
            if session.is_main:
                record = {"benchmark": arguments.what, **_about(session), **found}
                sys.stdout.write(show(record))
                sys.stdout.flush()
                _save(arguments.json, record)
    except HpctrainError as error:
        if not error.reported_by_rank_0:
            raise
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _open(arguments: argparse.Namespace) -> Session:
    """Open a session with the session options that the command has."""
    given = vars(arguments)
    names = ("backend", "precision", "compile", "batch_size", "start_timeout")
    options = {name: given[name] for name in names if given.get(name) is not None}
    size = 1
    if arguments.what == "step":
        # In half precision, ResNet-50 with 128 samples fills a GPU of 16 GB and keeps larger GPUs
        # busy. Do not use torch here: it would look for GPUs before the Session chooses one.
        shown = visible_gpus.visible(os.environ)
        size = 128 if visible_gpus.here() and (shown is None or shown.names) else 32
    defaults = {"precision": "fp32", "batch_size": size, "workers": 0, "timeout": _TIMEOUT}
    return Session(**{**defaults, **options})


def _about(session: Session) -> dict[str, Any]:
    """Return the facts that the figures depend on."""
    on_gpu = session.device.type == "cuda"
    return {
        **facts(["hpctrain", "torch", "torchvision", "horovod"]),
        "device": torch.cuda.get_device_name(session.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "backend": session.backend.name,
        "transport": session.backend.transport,
        "world": asdict(session.world),
    }


def show(record: dict[str, Any]) -> str:
    """Return the results as text: what was measured and where, a table, and notes."""
    world, machine = record["world"], record["machine"]
    ranks, hosts = world["world_size"], world["num_nodes"]
    device = record["device"] if record["device"] != "cpu" else machine["cpu"]
    return (
        f"{record['benchmark']}: {ranks} rank{'s' * (ranks > 1)} on {hosts} "
        f"host{'s' * (hosts > 1)}, {record['backend']} over {record['transport']}, {device}, "
        f"{machine['cores']} cores of rank 0\n"
        f"torch {record['versions']['torch']}, {record['date']}\n"
        f"{record['title']}\n\n{table(rows(record['results']))}\n\n"
        "Medians over rounds, with 95 % intervals; ratios round by round.\n"
        + (f"{record['notes']}\n" if "notes" in record else "")
    )


def _check_target(path: str | None) -> None:
    """Check that the file of --json can be written, before anything is measured.

    Raises:
        UsageError: the file or its folder is not writable, or the path is a folder.
    """
    if path is None:
        return
    target = path if os.path.exists(path) else os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise UsageError("HT904.no-write-access", path=path)


def _save(path: str | None, record: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        with open(path, "w") as file:
            file.write(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError("HT904.cannot-write", path=path, error=error) from None
    sys.stderr.write(f"hpctrain: saved to {path}\n")
