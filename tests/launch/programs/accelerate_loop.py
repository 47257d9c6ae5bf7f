"""A script for `accelerate launch`, in the manner of accelerate's quick tour."""

import hashlib
import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), reduction="sum")
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": accelerator.process_index,
        "size": accelerator.num_processes,
        "local_rank": accelerator.local_process_index,
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
