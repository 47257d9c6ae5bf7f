"""The parts of NVIDIA's Apex that scripts of 2018 to 2023 use, built on torch's own features.

`from apex import amp` becomes `from hpctrain.compat.apex import amp`, and likewise `apex.parallel`
and `apex.optimizers`. Apex's kernels are not needed. CPUs are supported as well.

A script that uses a `Session` has `--precision O0` to `O3` and does not need this package.

Source: NVIDIA/apex as of 2023, before its amp and parallel were removed, and its documentation.
"""

from hpctrain.compat.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]
