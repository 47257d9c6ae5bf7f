"""A script for horovodrun, in the manner of Horovod's pytorch_mnist.py."""

import hashlib
import json

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    hvd.init()
    data = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(data, torch.arange(48) % 10)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
