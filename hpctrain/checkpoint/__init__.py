"""Checkpoints that are whole or not there, written while training goes on.

    checkpoints/step-00000042/model.pt …      one file for each part of the state
                              manifest.json   sizes and hashes of the files, step, facts of the run

`snapshot` copies the state between two steps, `writer` has a thread that writes the copy, `folder`
commits it by a rename, `reading` holds what it loads against the manifest, `export` gives weights
to other programs.
"""

from hpctrain.checkpoint.export import export
from hpctrain.checkpoint.reading import load_newest
from hpctrain.checkpoint.writer import Writer, save

__all__ = ["Writer", "export", "load_newest", "save"]
