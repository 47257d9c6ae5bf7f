"""Checkpoints that are whole or not there, written while training goes on.

    checkpoints/step-00000042/model.pt …      one file for each part of the state
                              manifest.json   sizes and hashes of the files, step, facts of the run

`snapshot` copies the state between two steps, `writer` has a thread that writes the copy, `folder`
commits it by a rename, `reading` holds what it loads against the manifest, `export` gives weights
to other programs, `weights` takes those that a training begins with.
"""

from hpctrain.checkpoint.export import export
from hpctrain.checkpoint.loading import load_newest
from hpctrain.checkpoint.weights import check_weights, fill_weights
from hpctrain.checkpoint.writer import Writer, save

__all__ = ["Writer", "check_weights", "export", "fill_weights", "load_newest", "save"]
