"""A classifier of texts in the manner of accelerate's example."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import hpctrain

CONFIG = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(4, 12, (), generator=generator))
        tokens = torch.randint(1, 40, (length,), generator=generator)
        yield tokens, int(tokens[0] < 20)


def collate(batch):
    tokens = torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in batch], batch_first=True)
    labels = torch.tensor([label for _, label in batch])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


args = hpctrain.options().parse_args()
with hpctrain.Session(args, accumulate=2, lr_schedule="polynomial", lr_power=1) as session:
    train_loader = DataLoader(list(texts(192, 1)), batch_size=4, collate_fn=collate)
    eval_loader = DataLoader(list(texts(50, 2)), batch_size=8, collate_fn=collate)
    model = BertForSequenceClassification(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
    model, optimizer, train_loader, eval_loader = session.prepare(
        model, optimizer, train_loader, eval_loader
    )

    with session.run() as run:
        for _ in run.epochs(2):
            model.train()
            for batch in run.batches(train_loader):
                with session.autocast():
                    loss = model(**batch).loss
                session.backward(loss)
                session.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
            model.eval()
            losses = []
            for batch in eval_loader:
                with torch.no_grad():
                    logits = model(**batch).logits
                logits, labels = session.gather_for_metrics((logits, batch["labels"]))
                losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
            run.log(eval_loss=torch.cat(losses).mean())
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
