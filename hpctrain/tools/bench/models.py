"""Models of the step benchmark, and random batches for them."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError
from hpctrain.training.session import Session

__all__ = ["batch_of", "choose", "maker"]

SMALL = "small"
_LARGE = "resnet50"


def choose(given: str | None, device: torch.device) -> str:
    """Return the model's name: the given one, or the default.

    The default is ResNet-50 on a GPU if torchvision is installed, else the small model.

    Raises:
        UsageError: no model has that name, or torchvision, which provides it, is missing.
    """
    zoo = _zoo() if given != SMALL else None
    if given is None:
        return _LARGE if device.type == "cuda" and zoo else SMALL
    if given == SMALL:
        return given
    if zoo is None:
        raise _missing(f"--model {given}, but torchvision cannot be imported")
    names = zoo.list_models(module=zoo)
    if given not in names:
        raise UsageError(
            "HT906",
            f"--model {given}",
            "a model of torchvision.models, or small",
            f"--model {nearest(given, names) or _LARGE}",
        )
    return given


def maker(name: str) -> Callable[[], nn.Module]:
    """Return a function that creates a new model, the same on all ranks.

    Args:
        name: name that `choose` returned.

    Raises:
        UsageError: torchvision is missing on this rank, but not at rank 0.
    """
    if name == SMALL:
        return _small
    zoo = _zoo()
    if zoo is None:
        raise _missing("torchvision cannot be imported here, but it can at rank 0")
    # Leave out their second output, which is for training only: the step's loss does not use it.
    two = name in ("googlenet", "inception_v3")
    more = {"aux_logits": False, "init_weights": True} if two else {}
    return lambda: zoo.get_model(name, weights=None, **more)  # type: ignore[no-any-return]


def batch_of(name: str, session: Session) -> tuple[Tensor, Tensor]:
    """Return random images (samples, 3, side, side) and targets (samples) on the device."""
    side, classes = (32, 10) if name == SMALL else (224, 1000)
    samples = session.batches.batch_size
    images, targets = torch.randn(samples, 3, side, side), torch.randint(classes, (samples,))
    batch: tuple[Tensor, Tensor] = session.placement((images, targets))
    return batch


def _small() -> nn.Module:
    """Return a convolutional network whose step takes a few milliseconds on one core."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def _zoo() -> ModuleType | None:
    try:
        from torchvision import models
    except (ImportError, RuntimeError, OSError):  # from a torchvision built for another torch
        return None
    found: ModuleType = models
    return found


def _missing(found: str) -> UsageError:
    return UsageError(
        "HT905",
        found,
        "torchvision, which has the model, on all hosts",
        "pip install 'hpctrain[vision]'",
        "--model small",
    )
