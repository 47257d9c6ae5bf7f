"""How fast is this cluster, and what does hpctrain cost on it? Each figure beside its yardstick.

`measure` has what all measurements share and imports no torch; `turns` lets arms take turns in one
start; `step`, `allreduce`, `input` and `checkpoint` each measure one thing; `command` runs them.
"""
