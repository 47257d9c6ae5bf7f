"""What scripts of 2018 to 2023 call of NVIDIA's Apex, on what torch has itself by now.

`from apex import amp` becomes `from hpctrain.compat.apex import amp`, and likewise `apex.parallel`
and `apex.optimizers`. Apex's kernels are not needed, and all of it works on CPUs as well.

A script that uses a `Session` has `--precision O0` to `O3` and needs none of this.

Source: NVIDIA/apex as of 2023, before its amp and parallel were removed, and its documentation.
"""

from hpctrain.compat.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]
