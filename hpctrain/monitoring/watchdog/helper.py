"""Helper of a host, a separate program: `python -S -P helper.py FILE`; see `shared_memory`.

It needs only the standard library and this package, and ends with the ranks that it watches.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    """Watch until the last rank has left or is dead."""
    sys.path.append(str(Path(__file__).absolute().parents[3]))  # folder of this package
    from hpctrain.monitoring.watchdog.loop import Watch

    try:
        watch = Watch(Path(sys.argv[1]))
    except FileNotFoundError:
        return  # the ranks have left already, and the helper of another run has removed their file
    watch.run()
    os._exit(0)  # a thread may hang on a file system


if __name__ == "__main__":
    main()
