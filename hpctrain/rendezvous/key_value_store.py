"""Boards: where rank 0 leaves word of its addresses, if nothing else leads to it."""

import contextlib
import http.client
import os
from pathlib import Path
from typing import Protocol

from hpctrain.cluster.env_vars import MAIN_ADDRESS
from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import StartError

__all__ = ["FileStore", "HorovodStore", "KeyValueStore", "choose"]

_ANSWER_SECONDS = 5.0


class KeyValueStore(Protocol):
    """A place that all ranks of a start can read.

    Attributes:
        where: for people.
    """

    where: str

    def write(self, name: str, word: bytes) -> None:
        """Leave a word under a name, in place of any earlier one.

        Raises:
            OSError: it cannot be left.
        """

    def read(self, name: str) -> bytes | None:
        """The word, or None while there is none or the board cannot be reached."""

    def clear(self, name: str) -> None:
        """Take the word away, where that is needed."""


class HorovodStore:
    """horovodrun's own rendezvous server: values under /scope/key by HTTP.

    Source: horovod/runner/http/http_server.py, Horovod 0.28.1.

    Args:
        address, port: of the server, as horovodrun tells its processes.
    """

    def __init__(self, address: str, port: int) -> None:
        self.where = f"horovodrun's rendezvous at {address} port {port}"
        self._place = (address, port)

    def write(self, name: str, word: bytes) -> None:
        """A PUT."""
        if self._ask("PUT", name, word) is None:
            raise OSError(f"{self.where} does not answer")

    def read(self, name: str) -> bytes | None:
        """A GET."""
        return self._ask("GET", name, None)

    def clear(self, name: str) -> None:
        """Nothing: the server ends with its start."""

    def _ask(self, method: str, name: str, body: bytes | None) -> bytes | None:
        try:
            connection = http.client.HTTPConnection(*self._place, timeout=_ANSWER_SECONDS)
        except http.client.InvalidURL:
            return None
        try:
            connection.request(method, f"/hpctrain/{name}", body)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, UnicodeError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return said if answer.status == http.HTTPStatus.OK else None


class FileStore:
    """A file in a folder that all hosts see.

    Args:
        folder: made where it is missing, for as long as the word is there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._made = False
        self.where = f"a file in {self._folder}"

    def write(self, name: str, word: bytes) -> None:
        """By a temporary name, so that nobody reads a half."""
        self._made = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(word)
        temporary.replace(path)

    def read(self, name: str) -> bytes | None:
        """The file's content."""
        try:
            # NFS remembers that a file is not there until its folder is looked at again.
            os.scandir(self._folder).close()
            return self._path(name).read_bytes()
        except OSError:
            return None

    def clear(self, name: str) -> None:
        """Remove the file, and its folder if that was not there before and is empty."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()
            if self._made:
                self._folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f".rendezvous-{name}"


def choose(
    world: World, point: RendezvousPoint, store: KeyValueStore | None, folder: Path | None
) -> KeyValueStore | None:
    """The board of a start; None where its ranks find rank 0 without.

    Args:
        world, point: what the launcher says.
        store: the launcher's own, where it takes torch to talk to it.
        folder: for a file, where nothing better is there.

    Raises:
        StartError: nothing says where rank 0 is.
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
    raise StartError(
        f"{world.launcher} started {world.world_size} ranks and does not say where rank 0 is",
        "its host name or address",
        f"export {MAIN_ADDRESS}=HOST    (the host of rank 0, the same on all ranks)",
    )
