"""Checkpoints that are complete or absent, written while training continues.

    checkpoints/step-00000042/model.pt …      one file per part of the state, without its tensors
                              rank-00000.bin … elements of the tensors, which several ranks write
                              manifest.json   sizes and hashes of the files, which pieces of tensors
                                              are where, step, facts of the run

`snapshot` takes the state between two steps, and `buffers` copies its tensors. `writer` writes the
copy in a thread, `data_files` what this rank has of the tensors. `folder` commits the checkpoint
with a rename. `loading` checks what it loads against the manifest, and `stored` reads tensors.
`export` writes weights for other programs. `weights` loads initial weights.
"""

from hpctrain.checkpoint.data_files import Team
from hpctrain.checkpoint.export import export, frozen
from hpctrain.checkpoint.folder import process_name
from hpctrain.checkpoint.loading import open_checkpoint, places, refuse_damaged
from hpctrain.checkpoint.snapshot import freeze
from hpctrain.checkpoint.stored import Stored
from hpctrain.checkpoint.weight_files import Source, Weight
from hpctrain.checkpoint.weights import covering, fill_weights
from hpctrain.checkpoint.writer import Writer

__all__ = [
    "Source",
    "Stored",
    "Team",
    "Weight",
    "Writer",
    "covering",
    "export",
    "fill_weights",
    "freeze",
    "frozen",
    "open_checkpoint",
    "places",
    "process_name",
    "refuse_damaged",
]
