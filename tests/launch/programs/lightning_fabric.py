"""A script with Lightning's Fabric; devices and num_nodes must fit the ranks of the start."""

import argparse
import hashlib
import json

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    options = parser.parse_args()
    fabric = lightning.Fabric(
        accelerator="cpu", strategy="ddp", devices=options.devices, num_nodes=options.num_nodes
    )
    fabric.launch()
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    torch.manual_seed(fabric.global_rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
    total = fabric.all_reduce(torch.tensor([fabric.global_rank + 1.0]), reduce_op="sum")
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": fabric.global_rank,
        "size": fabric.world_size,
        "local_rank": fabric.local_rank,
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
