"""Runs of survivor.py that are disturbed, and what an undisturbed one left to compare them with.

Two runs are the same when final.pt has the same bits, every rank took every step with the same
samples, random numbers and weights, and the rows of metrics.jsonl agree.
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

# Bit-equal repeats, and a checkpoint that is rarely the end of an epoch.
OPTIONS = ("--deterministic", "--global-batch", "12", "--checkpoint-every", "5", "--ema", "0.9")
# What a row of metrics says of the day.
_OF_THE_DAY = ("time", "samples_per_second", "data_wait")
_MOST_STARTS = 6


@dataclass(frozen=True, slots=True)
class Start:
    """One start of all ranks.

    Attributes:
        results: of each rank: None, ("exit", code), or the exception.
        verdict: code and reason, or None where there is none.
    """

    results: list[Any]
    verdict: tuple[int, str] | None

    @property
    def code(self) -> int | None:
        """Of the verdict."""
        return self.verdict[0] if self.verdict else None


def start(size, *options, hurt=(), run="run", label=None, env=None, timeout=60.0):
    """Start survivor.py on ranks that are forked, in the current folder.

    Args:
        size: ranks.
        options: of the script, besides OPTIONS.
        hurt: its faults.
        run: directory of the run.
        label: in whose name the start has its stop file and its verdict (default: the run).
        env: more variables for all ranks.
        timeout: seconds; a protection.
    """
    label = label or run
    verdict, stop = Path(f"{label}.verdict").absolute(), Path(f"{label}.stop").absolute()
    verdict.unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    told = {"HPCTRAIN_VERDICT": str(verdict), "HPCTRAIN_STOP": str(stop), **(env or {})}
    argv = [*OPTIONS, *options, "--run", run, *(f"--fault={fault}" for fault in hurt)]
    results = ranks.run(size, survivor.main, argv, env=told, timeout=timeout)
    return Start(results, rundir.read_verdict(verdict))


def go_on(size, *options, **more):
    """Resume until the run is done; how often that took."""
    for count in range(1, _MOST_STARTS + 1):
        resumed = start(size, "--resume", *options, **more)
        if resumed.code == rundir.DONE:
            ranks.values(resumed.results)
            return count
    raise AssertionError(f"not done after {_MOST_STARTS} starts: {resumed}")


class References:
    """Undisturbed runs, one for each size and options.

    Args:
        folders: pytest's `tmp_path_factory`.
    """

    def __init__(self, folders):
        self._folders = folders
        self._runs = {}

    def __call__(self, size, *options, hurt=()):
        """The directory of the undisturbed run; `hurt` is what belongs to it all the same."""
        if (size, options, hurt) not in self._runs:
            path = self._folders.mktemp("undisturbed") / "run"
            here = os.getcwd()
            os.chdir(path.parent)
            try:
                done = start(size, *options, hurt=hurt)
            finally:
                os.chdir(here)
            ranks.values(done.results)
            assert done.code == rundir.DONE
            self._runs[size, options, hurt] = path
        return self._runs[size, options, hurt]


def same(run, reference):
    """Hold a run to another one, bit for bit."""
    mine, its = Path(run), Path(reference)
    unlike = sorted(differences(ledger(mine), ledger(its), "ledger"))
    assert not unlike, unlike[:5]
    finals = [torch.load(path / "final.pt", weights_only=True) for path in (mine, its)]
    unlike = sorted(differences(*finals, "final"))
    assert not unlike, unlike[:5]
    assert rows(mine) == rows(its)


def last_steps(run):
    """By rank, the step after the last one that it took: of a start that was stopped, the same."""
    last = {}
    for step, lines in ledger(run).items():
        last.update(dict.fromkeys(lines, step + 1))
    return last


def differences(one, other, place):
    """The places in which two nested values differ."""
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
    """The rows of metrics, without what depends on the day."""
    return [
        {name: value for name, value in row.items() if name not in _OF_THE_DAY}
        for row in rundir.RunDirectory(run).rows()
    ]


def ledger(run):
    """What counts of each step: by rank, the line of the last start that took it."""
    starts = {}
    for path in Path(run).glob("ledger-*.jsonl"):
        rank = int(path.stem.partition("-")[2])
        for text in path.read_text().splitlines():
            line = json.loads(text)
            starts.setdefault(line["step"], {}).setdefault(line.pop("start"), {})[rank] = line
    return {step: of_step[max(of_step)] for step, of_step in sorted(starts.items())}


def consumed(run, global_batch=12, steps_per_epoch=8):
    """By epoch, the ids of the samples that were taken; every step has a whole global batch."""
    epochs = {}
    for step, lines in ledger(run).items():
        ids = [i for line in lines.values() for i in line["ids"]]
        assert len(ids) == len(set(ids)) == global_batch, (step, lines)
        epochs.setdefault(step // steps_per_epoch, []).extend(ids)
    for epoch, ids in epochs.items():
        assert len(ids) == len(set(ids)), f"a sample twice in epoch {epoch}"
    return {epoch: sorted(ids) for epoch, ids in epochs.items()}
