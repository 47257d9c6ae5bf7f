"""Models of the step benchmark, and random batches for them."""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
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
    if given is None:
        return _LARGE if device.type == "cuda" and find_spec("torchvision") else SMALL
    if given != SMALL and given not in (names := _zoo().list_models(module=_zoo())):
        raise UsageError(
            "HT906.unknown-model", model=given, nearest=nearest(given, names) or _LARGE
        )
    return given


def maker(name: str) -> Callable[[], nn.Module]:
    """Return a function that creates a new model, the same on all ranks.

    Args:
        name: name that `choose` returned.

    Raises:
        UsageError: torchvision is missing on this host.
    """
    if name == SMALL:
        return _small
    # Leave out their second output, which is for training only: the step's loss does not use it.
    two = name in ("googlenet", "inception_v3")
    more = {"aux_logits": False, "init_weights": True} if two else {}
    return partial(_zoo().get_model, name, weights=None, **more)


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


def _zoo() -> ModuleType:
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, OSError) as error:  # or it was built for another torch
        raise UsageError("HT905.no-torchvision", error=error) from None
