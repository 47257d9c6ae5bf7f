"""A script with the Trainer of Hugging Face: a very small GPT-2 with random weights."""

import hashlib
import json
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main():
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            num_train_epochs=2,
            report_to="none",
            save_strategy="no",
        )
        tokens = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(0))
        dataset = [{"input_ids": row, "labels": row} for row in tokens]
        set_seed(arguments.process_index)
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(config)
        Trainer(model, arguments, train_dataset=dataset).train()
    total = torch.tensor([arguments.process_index + 1.0])
    dist.all_reduce(total)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    line = {
        "rank": arguments.process_index,
        "size": arguments.world_size,
        "local_rank": arguments.local_process_index,
        "sum": total.item(),
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    }
    print(f"AGREES {json.dumps(line)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
