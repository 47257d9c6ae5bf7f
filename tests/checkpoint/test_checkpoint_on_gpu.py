"""A checkpoint of a state on a GPU: copied without a sync, with the values of its step."""

import on_gpu
import ranks
import torch
from checkpoints import load_newest

from hpctrain.checkpoint import Writer
from hpctrain.rundir import RunDirectory


def save_while_state_changes():
    """Save steps 1 to 3, change the state in place after each; return what the last one holds."""
    big = torch.zeros(50_000_000, device=on_gpu.DEVICE)
    small = [torch.zeros(3, n, device=on_gpu.DEVICE)[:, ::2] for n in range(1, 50)]
    busy = torch.randn(4000, 4000, device=on_gpu.DEVICE)
    on_cpu = torch.zeros(5)
    directory = RunDirectory("run")
    writer = Writer(directory)

    def save(step):
        for tensor in (big, *small, on_cpu):
            tensor.fill_(step)
        for _ in range(20):
            torch.mm(busy, busy)  # the copy has to wait in the stream for this
        writer.save(step, {"model": {"big": big, "small": small, "on_cpu": on_cpu}}, {})
        for tensor in (big, *small, on_cpu):
            tensor.fill_(-1)

    save(1)  # allocates the memory
    writer.wait()
    torch.cuda.synchronize()
    with on_gpu.never_waits():
        for step in (2, 3):
            save(step)
    writer.close()
    found, state = load_newest(directory)
    model = state["model"]
    tensors = [model["big"], *model["small"], model["on_cpu"]]
    shapes = [tuple(tensor.shape) for tensor in model["small"]]
    return found, {float(v) for t in tensors for v in t.unique()}, shapes


def test_checkpoint_copy_from_gpu_does_not_sync(gpu):
    (found,) = ranks.values(gpu(1, save_while_state_changes))
    assert found == (3, {3.0}, [(3, (n + 1) // 2) for n in range(1, 50)])
