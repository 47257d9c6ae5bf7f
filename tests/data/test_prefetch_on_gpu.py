"""Batches are copied to a GPU while it computes, without a sync."""

import on_gpu
import pytest
import ranks
import torch
from battery import session

SAMPLES, SIZE = 64, 16


def dataset():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.arange(SAMPLES))


def halve(batch):
    return batch[0].float() / 2, batch[1]


def load_twice(workers):
    """Return the batches of two passes; the second raises an error where it waits for the GPU."""
    with session(batch_size=SIZE, workers=workers, channels_last=True) as opened:
        loader = opened.loader(dataset(), train=False, batch_size=SIZE, on_device=halve)
        busy = torch.ones(4096, 4096, device=on_gpu.DEVICE)
        first = [(images.clone(), targets) for images, targets in loader]
        second = []
        with on_gpu.never_waits():
            for images, targets in loader:
                busy = busy @ busy  # the copy of the next batch must not wait for it
                second.append((images * 1, targets))
        return first, second


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_copied_while_the_gpu_computes_without_a_sync(gpu, workers):
    ((first, again),) = ranks.values(gpu(1, load_twice, workers))
    expected = dataset().tensors[0].float() / 2
    for batches in (first, again):
        assert torch.cat([images for images, _ in batches]).equal(expected)
        assert torch.cat([targets for _, targets in batches]).tolist() == list(range(SAMPLES))
        assert all(i.is_contiguous(memory_format=torch.channels_last) for i, _ in batches)
