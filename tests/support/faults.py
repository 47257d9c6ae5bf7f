"""Runs of survivor.py with faults, and uninterrupted runs to compare with.

Two runs are the same if final.pt has the same bits, every rank took every step with the same
samples, random numbers and weights, and the rows of metrics.jsonl agree. A deterministic run that
starts again from step 0 has the same bits, too. Therefore `same` and `resume` also check that every
start began at the newest checkpoint (`check_begins`), and tests count the `repeated` steps.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks
import survivor
import torch

from hpctrain import rundir
from hpctrain.errors import exit_codes
from hpctrain.rundir.exit_status import read_exit_status

# Bit-equal repeats, and checkpoints that are rarely at the end of an epoch.
OPTIONS = ("--deterministic", "--global-batch", "12", "--checkpoint-every", "5")
# Values of a row of metrics that depend on the time, or are a peak since the start.
_OF_THE_DAY = ("time", "samples_per_second", "data_wait", "gpu_memory")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of all ranks.

    Attributes:
        results: of each rank: None, ("exit", code), or the exception.
        exit_status: code and reason, or None where there is none.
    """

    results: list[Any]
    exit_status: tuple[int, str] | None

    @property
    def code(self) -> int | None:
        """The code of the exit status."""
        return self.exit_status[0] if self.exit_status else None


def start(size, *options, hurt=(), run="run", label=None, env=None, timeout=180.0):
    """Start survivor.py on forked ranks in the current folder.

    Args:
        size: ranks.
        options: of the script, besides OPTIONS.
        hurt: the faults.
        run: the run directory.
        label: the prefix of its stop file and exit status file (default: the run).
        env: more variables for all ranks.
        timeout: seconds.
    """
    label = label or run
    exit_status_file = Path(f"{label}.exit-status").absolute()
    stop = Path(f"{label}.stop").absolute()
    exit_status_file.unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    files = {
        "HPCTRAIN_EXIT_STATUS_FILE": str(exit_status_file),
        "HPCTRAIN_STOP_FILE": str(stop),
    }
    argv = [*OPTIONS, *options, "--run-dir", run, *(f"--fault={fault}" for fault in hurt)]
    env = {**files, **(env or {})}
    results = ranks.run(size, survivor.main, argv, env=env, timeout=timeout)
    return Start(results, read_exit_status(exit_status_file))


def resume(size, *options, run="run", **more):
    """Resume a run in one start to its end."""
    resumed = start(size, "--resume", *options, run=run, **more)
    assert resumed.code == exit_codes.DONE, resumed
    ranks.values(resumed.results)
    check_begins(run)


class References:
    """Uninterrupted runs, one for each size and options.

    Args:
        folders: pytest's `tmp_path_factory`.
    """

    def __init__(self, folders):
        self._folders = folders
        self._runs = {}

    def __call__(self, size, *options, hurt=()):
        """Return the directory of an uninterrupted run; `hurt` has faults that it also has."""
        if (size, options, hurt) not in self._runs:
            path = self._folders.mktemp("uninterrupted") / "run"
            here = os.getcwd()
            os.chdir(path.parent)
            try:
                done = start(size, *options, hurt=hurt, timeout=1800.0)  # of many epochs
            finally:
                os.chdir(here)
            ranks.values(done.results)
            assert done.code == exit_codes.DONE
            self._runs[size, options, hurt] = path
        return self._runs[size, options, hurt]


def same(run, reference, twice=None):
    """Check that a run is bit-equal to another one.

    Args:
        run: directory of the run with faults.
        reference: directory of the other run.
        twice: number of steps that it must have repeated (default: any number).
    """
    directory, other = Path(run), Path(reference)
    check_begins(directory)
    assert twice in (None, repeated(directory)), (repeated(directory), begins(directory))
    unlike = sorted(differences(ledger(directory), ledger(other), "ledger"))
    assert not unlike, unlike[:5]
    finals = [torch.load(path / "final.pt", weights_only=True) for path in (directory, other)]
    unlike = sorted(differences(*finals, "final"))
    assert not unlike, unlike[:5]
    assert rows(directory) == rows(other)


def begins(run):
    """Return the first step of each start of a run that began to train."""
    return [line["step"] for line in _lines(Path(run, "begins.jsonl"))]


def check_begins(run):
    """Check that each start began at its newest checkpoint, and took all steps from there."""
    run = Path(run)
    lines = _lines(run / "begins.jsonl")
    assert lines, f"no start in {run} began to train"
    for line in lines:
        assert line["step"] == line["committed"], f"it did not begin at its checkpoint: {line}"
    began = {line["start"]: line["step"] for line in lines}
    for path in run.glob("ledger-*.jsonl"):
        taken = {}
        for line in _lines(path):
            taken.setdefault(line["start"], []).append(line["step"])
        for number, steps in taken.items():
            first = began[number]
            assert steps == list(range(first, first + len(steps))), (path.name, number, steps)
    assert started_at(run)[-1] == lines[-1]["step"], (started_at(run), lines)


def started_at(run="run"):
    """Return the first step of each start of any run, from starts.jsonl."""
    directory = rundir.RunDirectory(run)
    return [line["step"] for line in directory.lines(directory.starts)]


def repeated(run):
    """Return how many times steps were repeated, by the rank with the most repeats."""
    steps = ([line["step"] for line in _lines(path)] for path in Path(run).glob("ledger-*.jsonl"))
    return max(len(taken) - len(set(taken)) for taken in steps)


def lost(run):
    """Return the seconds from the last step before each new start to the next new step.

    They include the repeated steps, and the time until the fault was found.
    """
    seconds, last, furthest = {}, None, -1
    for line in _lines(Path(run, "ledger-0.jsonl")):
        if line["step"] > furthest:
            if last and line["start"] > last["start"]:
                seconds[line["start"]] = line["time"] - last["time"]
            last, furthest = line, line["step"]
    return list(seconds.values())


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_steps(run):
    """Return, by rank, the step after its last one; all are equal if the start was stopped."""
    last = {}
    for step, lines in ledger(run).items():
        last.update(dict.fromkeys(lines, step + 1))
    return last


def differences(one, other, place):
    """Yield the places in which two nested values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{place}: {len(one)} and {len(other)}"
        for number, pair in enumerate(zip(one, other, strict=False)):
            yield from differences(*pair, f"{place}.{number}")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield place
    elif one != other:
        yield f"{place}: {one} and {other}"


def rows(run):
    """Return the rows of metrics without the values that depend on the time."""
    return [
        {name: value for name, value in row.items() if name not in _OF_THE_DAY}
        for row in rundir.RunDirectory(run).rows()
    ]


def ledger(run):
    """Return, by step and rank, the line of the last start that took the step."""
    starts = {}
    for path in Path(run).glob("ledger-*.jsonl"):
        rank = int(path.stem.partition("-")[2])
        for line in _lines(path):
            del line["time"]
            starts.setdefault(line["step"], {}).setdefault(line.pop("start"), {})[rank] = line
    return {step: of_step[max(of_step)] for step, of_step in sorted(starts.items())}


def consumed(run, global_batch=12, steps_per_epoch=8):
    """Return the ids of the samples by epoch; check that every step has a full global batch."""
    epochs = {}
    for step, lines in ledger(run).items():
        ids = [i for line in lines.values() for i in line["ids"]]
        assert len(ids) == len(set(ids)) == global_batch, (step, lines)
        epochs.setdefault(step // steps_per_epoch, []).extend(ids)
    for epoch, ids in epochs.items():
        assert len(ids) == len(set(ids)), f"a sample twice in epoch {epoch}"
    return {epoch: sorted(ids) for epoch, ids in epochs.items()}
