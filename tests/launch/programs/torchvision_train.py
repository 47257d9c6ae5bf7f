"""A script in the manner of torchvision's references: variables of torchrun, else of srun."""

import hashlib
import json
import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import ToTensor


def place():
    """Return rank, number of ranks and local rank."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    return [int(os.environ[name]) for name in names]


def main():
    rank, size, local_rank = place()
    dist.init_process_group("gloo", init_method="env://", world_size=size, rank=rank)
    dist.barrier()
    dataset = torchvision.datasets.FakeData(24, (3, 32, 32), transform=ToTensor())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    torch.manual_seed(rank)
    model = torchvision.models.get_model("squeezenet1_1", weights=None, num_classes=10)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    total = torch.tensor([rank + 1.0])
    dist.barrier()
    dist.all_reduce(total)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "local_rank": local_rank,
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
