"""Key-value stores in which rank 0 publishes its addresses, if nothing else leads to it."""

import contextlib
import http.client
import os
from pathlib import Path
from typing import Protocol

from hpctrain import rundir
from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import StartError

__all__ = ["FileStore", "HorovodStore", "KeyValueStore", "choose"]

_ANSWER_SECONDS = 5.0


class KeyValueStore(Protocol):
    """A key-value store that all ranks of a start can read.

    Attributes:
        where: description of the store for error messages.
    """

    where: str

    def write(self, name: str, value: bytes) -> None:
        """Publish a value under a name, in place of any earlier one.

        Raises:
            OSError: the value cannot be written.
        """

    def read(self, name: str) -> bytes | None:
        """Return the value, or None if there is none or the store cannot be reached."""

    def clear(self, name: str) -> None:
        """Remove the value, if that is needed."""


class HorovodStore:
    """The rendezvous server of horovodrun: values under /scope/key over HTTP.

    Source: horovod/runner/http/http_server.py, Horovod 0.28.1.

    Args:
        address, port: address and port of the server, as horovodrun gives them to its processes.
    """

    def __init__(self, address: str, port: int) -> None:
        self.where = f"horovodrun's rendezvous at {address} port {port}"
        self._place = (address, port)

    def write(self, name: str, value: bytes) -> None:
        """Send the value with PUT."""
        if self._request("PUT", name, value) is None:
            raise OSError(f"{self.where} does not answer")

    def read(self, name: str) -> bytes | None:
        """Fetch the value with GET."""
        return self._request("GET", name, None)

    def clear(self, name: str) -> None:
        """Do nothing: the server ends with its start."""

    def _request(self, method: str, name: str, body: bytes | None) -> bytes | None:
        try:
            connection = http.client.HTTPConnection(*self._place, timeout=_ANSWER_SECONDS)
            with contextlib.closing(connection):
                connection.request(method, f"/hpctrain/{name}", body)
                answer = connection.getresponse()
                content = answer.read()
        except (OSError, UnicodeError, http.client.HTTPException):
            return None
        return content if answer.status == http.HTTPStatus.OK else None


class FileStore:
    """A file in a folder that all hosts can read.

    Args:
        folder: folder of the file; if missing, it is created, and removed with the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._made = False
        self.where = f"a file in {self._folder}"

    def write(self, name: str, value: bytes) -> None:
        """Write a temporary file and rename it, so that no rank reads an incomplete value."""
        self._made = not self._folder.exists()
        rundir.replace(self._path(name), value)

    def read(self, name: str) -> bytes | None:
        """Return the content of the file, or None if it cannot be read."""
        try:
            # NFS caches that a file is missing until its folder is read again.
            os.scandir(self._folder).close()
            return self._path(name).read_bytes()
        except OSError:
            return None

    def clear(self, name: str) -> None:
        """Remove the file, and its folder if `write` created it and it is empty."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()
            if self._made:
                self._folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f".rendezvous-{name}"


def choose(
    world: World, point: RendezvousPoint, store: KeyValueStore | None, folder: Path | None
) -> KeyValueStore | None:
    """Return the key-value store of a start, or None if its ranks find rank 0 without one.

    Args:
        world, point: place of this rank and rendezvous point, from its launcher.
        store: the launcher's own store, if access to it needs torch.
        folder: folder for a file, used if there is no better way.

    Raises:
        StartError: there is no way to find rank 0.
    """
    if store is not None:
        return store
    if point.store is not None and point.store.kind == "horovodrun":
        return HorovodStore(point.store.address, point.store.port)
    if (point.address and point.sure) or point.others:
        return None
    if folder is not None:
        return FileStore(folder)
    if point.address:
        return None
    raise StartError("HT203.address-unknown", world=world)
