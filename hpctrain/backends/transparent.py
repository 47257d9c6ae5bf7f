"""A mixin for torch's model wrappers, so that they look like the plain model."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["Transparent"]


class Transparent(nn.Module):
    """A mixin that exposes the attributes, names and state of the model in `module`.

    It stands before the wrapper: `class TransparentDDP(Transparent, DistributedDataParallel)`.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model inside, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the model inside."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load for a module around this one, such as an average: its state has no wrapper either.

        torch passes the names below `prefix`, and then those of each child to it.
        """
        for name in list(state_dict):
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the model inside, with names without a prefix."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the model inside, with names without a prefix."""
        yield from self.module.named_buffers(*args, **kwargs)

    # For nn.Sequential, ModuleList and similar; other models raise their own errors.
    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # even if the model has no length
