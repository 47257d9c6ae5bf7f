"""`hpctrain bench`: speed of a cluster and cost of hpctrain, each compared with a reference.

The compared variants of a benchmark are its arms. `turns` runs them in turn within one start.
`step` and `allreduce` each measure one thing, and `runner` runs them.
`baseline` has the direct calls of torch and Horovod. `measure` imports no torch: the programs in
benchmarks/ share it, and make the tables of the pages with it.
"""
