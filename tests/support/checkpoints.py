"""Checkpoints of a few numbers, which say of which step they are."""

import torch

from hpctrain.checkpoint import load_newest, save
from hpctrain.rundir import RunDirectory


def state_of(step, size=6):
    return {
        "model": {"weight": torch.full((size,), float(step))},
        "position": {"step": step},
    }


def two_checkpoints(path):
    """A run with checkpoints of steps 1 and 2."""
    directory = RunDirectory(path)
    for step in (1, 2):
        save(directory, step, state_of(step), {})
    return directory


def newest(run):
    """The step that is loaded; the state is that of the step."""
    step, state = load_newest(run)
    assert state["position"] == {"step": step}
    assert (state["model"]["weight"] == float(step)).all()
    return step


def names(run):
    return sorted(entry.name for entry in run.checkpoints.iterdir())
