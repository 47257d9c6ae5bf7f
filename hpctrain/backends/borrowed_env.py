"""Environment variables that a library reads: set for it, and restored afterwards."""

from collections.abc import MutableMapping

__all__ = ["Environment"]


class Environment:
    """Changes of environment variables that can be undone.

    Args:
        environ: mapping to change, such as `os.environ`.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._before: dict[str, str | None] = {}

    def set(self, name: str, value: str | None) -> None:
        """Set a variable; None removes it."""
        self._before.setdefault(name, self._environ.get(name))
        if value is None:
            self._environ.pop(name, None)
        else:
            self._environ[name] = value

    def default(self, name: str, value: str | None) -> None:
        """Set a variable that is not set; None changes nothing."""
        if value is not None and name not in self._environ:
            self.set(name, value)

    def put_back(self) -> None:
        """Restore every changed variable."""
        for name, value in self._before.items():
            if value is None:
                self._environ.pop(name, None)
            else:
                self._environ[name] = value
        self._before.clear()
