"""Seeds: independent streams of random numbers from one seed."""

import hashlib

__all__ = ["derive"]


def derive(*numbers: int | str) -> int:
    """A seed from 0 to 2**63 - 1 that follows from all of the numbers, and from nothing else.

    Sums and products of seed, epoch and rank meet each other's streams; a hash does not.
    """
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
