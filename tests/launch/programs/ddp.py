"""A script for torchrun, in the manner of PyTorch's tutorial on DistributedDataParallel."""

import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(data, data.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    torch.manual_seed(dist.get_rank())  # DistributedDataParallel copies the weights of rank 0
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
