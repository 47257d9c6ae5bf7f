"""`hpctrain` and `python -m hpctrain`. Read by any Python 3, so that an old one gets an answer."""

import sys

OLDEST = (3, 11)


def main():  # type: ignore[no-untyped-def]
    """Run the command line; an exit code."""
    if sys.version_info < OLDEST:
        sys.stderr.write(
            "hpctrain needs Python {}.{} or newer, this is {}.{}. On a cluster: module avail "
            "python, then module load one, or conda create -n hpctrain python=3.12\n".format(
                *(OLDEST + tuple(sys.version_info[:2]))
            )
        )
        return 2
    from hpctrain.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[no-untyped-call]
