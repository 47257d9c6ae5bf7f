"""A state on a GPU: copied without waiting for it, as it is at the boundary."""

import on_gpu
import ranks
import torch

from hpctrain.checkpoint import Writer, load_newest
from hpctrain.rundir import RunDirectory


def saved_while_all_changes():
    """Steps 1 to 3, each changed in place right after its save; what each is when it is loaded."""
    big = torch.zeros(50_000_000, device=on_gpu.DEVICE)
    small = [torch.zeros(3, n, device=on_gpu.DEVICE)[:, ::2] for n in range(1, 50)]
    busy = torch.randn(4000, 4000, device=on_gpu.DEVICE)
    here = torch.zeros(5)
    directory = RunDirectory("run")
    writer = Writer(directory)

    def save(step):
        for tensor in (big, *small, here):
            tensor.fill_(step)
        for _ in range(20):
            torch.mm(busy, busy)  # the copy has to wait in the stream for this
        writer.save(step, {"model": {"big": big, "small": small, "here": here}}, {})
        for tensor in (big, *small, here):
            tensor.fill_(-1)

    save(1)  # takes the memory
    writer.wait()
    torch.cuda.synchronize()
    with on_gpu.never_waits():
        for step in (2, 3):
            save(step)
    writer.close()
    found, state = load_newest(directory)
    model = state["model"]
    tensors = [model["big"], *model["small"], model["here"]]
    shapes = [tuple(tensor.shape) for tensor in model["small"]]
    return found, {float(v) for t in tensors for v in t.unique()}, shapes


def test_checkpoint_copy_from_gpu_does_not_sync(gpu):
    (found,) = ranks.values(gpu(1, saved_while_all_changes))
    assert found == (3, {3.0}, [(3, (n + 1) // 2) for n in range(1, 50)])
