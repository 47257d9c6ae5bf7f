"""Seeds for independent streams of random numbers, derived from one seed."""

import hashlib

__all__ = ["derive"]


def derive(*numbers: int | str) -> int:
    """Derive a seed from 0 to 2**63 - 1 from all of the numbers, and from nothing else.

    Sums and products of seed, epoch and rank can give equal seeds for two streams; a hash avoids
    this.
    """
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
