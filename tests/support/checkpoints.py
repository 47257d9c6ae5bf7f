"""Small checkpoints whose state shows their step."""

import torch

from hpctrain.checkpoint import freeze
from hpctrain.checkpoint.data_files import Team, plan
from hpctrain.checkpoint.folder import Folder
from hpctrain.checkpoint.loading import open_newest
from hpctrain.rundir import RunDirectory


def state_of(step, size=6):
    return {
        "model": {"weight": torch.full((size,), float(step))},
        "position": {"step": step},
    }


def save(directory, step, state, facts, **options):
    """Commit a checkpoint in this thread, with options of `Folder`, and return its folder."""
    folder, snapshot = Folder(directory, **options), freeze(state)
    plan(snapshot, Team())
    folder.save(step, snapshot, facts, folder.temporary(step))
    return directory.checkpoint(step)


def two_checkpoints(path):
    """Make a run with checkpoints of steps 1 and 2; return its directory."""
    directory = RunDirectory(path)
    for step in (1, 2):
        save(directory, step, state_of(step), {})
    return directory


def load_newest(run):
    """Return step and state of the newest checkpoint that is not damaged; None without any."""
    found = open_newest(run)
    return found and (found[0], found[1].read())


def newest(run):
    """Load the newest checkpoint; return its step, and check that the state is that of the step."""
    step, state = load_newest(run)
    assert state["position"] == {"step": step}
    assert (state["model"]["weight"] == float(step)).all()
    return step


def names(run):
    return sorted(entry.name for entry in run.checkpoints.iterdir())
