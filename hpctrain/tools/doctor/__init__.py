"""`hpctrain doctor`: checks of this machine and of the ranks of a launch.

The checks also work where torch is missing or broken. Each rank checks its own machine, sends its
warnings and problems to the others at the rendezvous, and computes test sums with them. Rank 0
prints the report.
"""

from hpctrain.tools.doctor.ranks import examine

__all__ = ["examine"]
