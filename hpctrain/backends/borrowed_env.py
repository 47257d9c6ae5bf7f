"""Variables that a library reads from the environment alone: lent to it, and put back."""

from collections.abc import MutableMapping

__all__ = ["Environment"]


class Environment:
    """Changes of an environment that can be undone.

    Args:
        environ: what is changed, such as `os.environ`.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._before: dict[str, str | None] = {}

    def set(self, name: str, value: str | None) -> None:
        """Give a variable a value; None takes it away."""
        self._before.setdefault(name, self._environ.get(name))
        if value is None:
            self._environ.pop(name, None)
        else:
            self._environ[name] = value

    def default(self, name: str, value: str | None) -> None:
        """Give a value to a variable that has none; None leaves it so."""
        if value is not None and name not in self._environ:
            self.set(name, value)

    def put_back(self) -> None:
        """Leave every variable as it was found."""
        for name, value in self._before.items():
            if value is None:
                self._environ.pop(name, None)
            else:
                self._environ[name] = value
        self._before.clear()
