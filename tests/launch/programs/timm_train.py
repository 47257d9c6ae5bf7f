"""A script in the manner of timm's train.py: timm finds its ranks itself, in Slurm's way first."""

import argparse
import hashlib
import json

import timm
import torch
import torch.distributed as dist
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from timm.utils import init_distributed_device, random_seed
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import FakeData


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    init_distributed_device(options)
    random_seed(1, options.rank)
    loader = create_loader(
        FakeData(24, (3, 32, 32)),
        input_size=(3, 32, 32),
        batch_size=4,
        is_training=True,
        use_prefetcher=False,
        distributed=options.distributed,
        num_workers=0,
        device=torch.device(options.device),
    )
    model = DistributedDataParallel(timm.create_model("resnet10t", num_classes=10))
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.01)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    total = torch.tensor([options.rank + 1.0])
    dist.all_reduce(total)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": options.rank,
        "size": options.world_size,
        "local_rank": options.local_rank,
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
