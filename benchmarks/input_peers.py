"""Random crops of JPEG files by other libraries, for input.py: one thread, pixels or floats."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import simplejpeg
import torch
import torchvision
from torchvision.transforms import v2

__all__ = ["arms"]

Arm = Callable[[], object]
_SIZE = (224, 224)
_SCALE, _RATIO = [0.08, 1.0], [3 / 4, 4 / 3]
_MEAN, _STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


def arms(files: Sequence[bytes]) -> dict[str, Arm]:
    """Return an arm for each library that is installed; it makes a crop of each file."""
    crop = v2.Compose([v2.RandomResizedCrop(_SIZE, antialias=True), v2.RandomHorizontalFlip()])

    def by_torchvision() -> None:
        for file in files:
            crop(torchvision.io.decode_jpeg(torch.frombuffer(file, dtype=torch.uint8)))

    def by_simplejpeg() -> None:
        for file in files:
            crop(torch.from_numpy(simplejpeg.decode_jpeg(file, "RGB")).permute(2, 0, 1))

    found: dict[str, Arm] = {
        "torchvision, its decoder": by_torchvision,
        "simplejpeg, torchvision's crop": by_simplejpeg,
    }
    optional = {
        "DALI on the CPU, to floats": ("nvidia-dali-cuda130", _dali),
        "SPDL": ("spdl-io, and the libraries of FFmpeg", _spdl),
    }
    for name, (packages, make) in optional.items():
        try:
            found[name] = make(files)
            found[name]()
        except (ImportError, RuntimeError) as error:
            found.pop(name, None)
            reason = str(error).partition(". ")[0]
            print(f"{name}: left out: {reason}; it needs {packages}")
    return found


def _dali(files: Sequence[bytes]) -> Arm:
    from nvidia.dali import fn, pipeline_def, types

    batch = [np.frombuffer(file, np.uint8) for file in files]

    @pipeline_def(batch_size=len(batch), num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        read = fn.external_source(source=lambda: batch, dtype=types.UINT8)
        images = fn.decoders.image_random_crop(read, output_type=types.RGB)
        images = fn.resize(images, size=_SIZE, antialias=True)
        flips = fn.random.coin_flip()
        return fn.crop_mirror_normalize(images, mirror=flips, mean=_MEAN, std=_STD)

    # Not ahead of the arm that is measured.
    built = pipeline(prefetch_queue_depth=1, exec_pipelined=False, exec_async=False)
    built.build()
    run: Arm = built.run
    return run


def _spdl(files: Sequence[bytes]) -> Arm:
    from spdl import io

    draw = torchvision.transforms.RandomResizedCrop.get_params

    def each() -> Iterable[object]:
        for file in files:
            height, width = simplejpeg.decode_jpeg_header(file)[:2]
            top, left, rows, columns = draw(torch.empty(3, height, width), _SCALE, _RATIO)
            words = f"crop={columns}:{rows}:{left}:{top},scale={_SIZE[1]}:{_SIZE[0]},"
            words += ("hflip," if torch.rand(()) < 0.5 else "") + "format=pix_fmts=rgb24"
            yield io.to_torch(io.load_image(file, filter_desc=words))

    return lambda: [None for _ in each()]
