"""Checkpoints that are complete or absent, written while training continues.

    checkpoints/step-00000042/model.pt …      one file per part of the state
                              manifest.json   sizes and hashes of the files, step, facts of the run

`snapshot` copies the state between two steps. `writer` writes the copy in a thread. `folder`
commits the checkpoint with a rename. `loading` checks what it loads against the manifest. `export`
writes weights for other programs. `weights` loads initial weights.
"""

from hpctrain.checkpoint.export import export, frozen
from hpctrain.checkpoint.loading import load, load_newest, places, read_manifest
from hpctrain.checkpoint.name_patterns import covering
from hpctrain.checkpoint.snapshot import freeze
from hpctrain.checkpoint.weights import check_weights, fill_weights
from hpctrain.checkpoint.writer import Writer, save

__all__ = [
    "Writer",
    "check_weights",
    "covering",
    "export",
    "fill_weights",
    "freeze",
    "frozen",
    "load",
    "load_newest",
    "places",
    "read_manifest",
    "save",
]
