"""Program that serves a TCPStore on a listening socket, as torchrun's agent does.

    python -m hpctrain.backends.distributed.store_process FD

It runs until it is ended. `hpctrain.launch.stores` starts it when a first client connects.
"""

import signal
import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["main"]


def main() -> None:
    """Serve the store on the socket whose file descriptor is the first argument."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
