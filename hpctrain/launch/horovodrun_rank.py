"""Becomes a rank that horovodrun started: with the environment that a file holds.

    python horovodrun_rank.py FILE

A program of its own, which needs nothing but the standard library. horovodrun writes the
environment of its ranks on command lines, where every user of the hosts can read it; what stands in
FILE only its owner can. FILE is JSON: `environ`, and `command`, a list.
"""

import json
import os
import sys

# horovodrun sets it to the interface of its own host, which another one may call otherwise.
_NOT_TAKEN = "NCCL_SOCKET_IFNAME"


def main() -> None:
    """Run the command of the file in place of this process."""
    with open(sys.argv[1]) as file:
        start = json.load(file)
    here = {name: value for name, value in os.environ.items() if name != _NOT_TAKEN}
    # Who this rank is.
    place = {name: value for name, value in here.items() if name.startswith("HOROVOD_")}
    environ = {**here, **start["environ"], **place}
    os.execvpe(start["command"][0], start["command"], environ)  # noqa: S606


if __name__ == "__main__":
    main()
