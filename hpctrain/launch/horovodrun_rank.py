"""Program that horovodrun starts for a rank: it runs the command of a file, with its environment.

    python horovodrun_rank.py FILE

It needs only the standard library. horovodrun writes the environment of its ranks to command lines,
which every user of the hosts can read. FILE can be read only by its owner. FILE is JSON: `environ`,
and `command`, a list.
"""

import json
import os
import sys

# horovodrun sets it to the interface of its own host, which may have another name on other hosts.
_NOT_TAKEN = "NCCL_SOCKET_IFNAME"


def main() -> None:
    """Run the command of the file in place of this process."""
    with open(sys.argv[1]) as file:
        start = json.load(file)
    here = {name: value for name, value in os.environ.items() if name != _NOT_TAKEN}
    # Rank and world size.
    place = {name: value for name, value in here.items() if name.startswith("HOROVOD_")}
    environ = {**here, **start["environ"], **place}
    os.execvpe(start["command"][0], start["command"], environ)  # noqa: S606


if __name__ == "__main__":
    main()
