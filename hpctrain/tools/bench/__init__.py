"""`hpctrain bench`: speed of a cluster and cost of hpctrain, each compared with a reference.

The compared variants of a benchmark are its arms. `turns` runs them in turn within one start.
`step`, `allreduce`, `input` and `checkpoint` each measure one thing, and `runner` runs them.
`measure` has the functions that they share, and imports no torch.
"""
