"""A script with Lightning's Trainer; devices and num_nodes must fit the ranks of the start."""

import argparse
import hashlib
import json

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    options = parser.parse_args()
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=2,
    )
    torch.manual_seed(trainer.global_rank)
    model = Model()
    trainer.fit(model, loader)
    total = trainer.strategy.reduce(torch.tensor([trainer.global_rank + 1.0]), reduce_op="sum")
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": trainer.global_rank,
        "size": trainer.world_size,
        "local_rank": trainer.local_rank,
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
