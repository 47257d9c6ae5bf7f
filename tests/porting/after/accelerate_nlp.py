"""A classifier of texts in the manner of accelerate's example."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hpctrain


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 32, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.block(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden[:, 0])
        return F.cross_entropy(logits, labels), logits


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(4, 12, (), generator=generator))
        tokens = torch.randint(1, 40, (length,), generator=generator)
        yield tokens, int(tokens[0] < 20)


def collate(batch):
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in batch], batch_first=True)
    labels = torch.tensor([label for _, label in batch])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


args = hpctrain.options().parse_args()
with hpctrain.Session(args, accumulate=2) as session:
    train_loader = DataLoader(list(texts(192, 1)), batch_size=4, collate_fn=collate)
    eval_loader = DataLoader(list(texts(50, 2)), batch_size=8, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
    model, optimizer, train_loader, eval_loader = session.prepare(
        model, optimizer, train_loader, eval_loader
    )
    steps = 2 * (len(train_loader) // 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0))
    schedule = session.prepare(schedule)

    with session.run() as run:
        for _ in run.epochs(2):
            model.train()
            for batch in run.batches(train_loader):
                with session.autocast():
                    loss, _ = model(**batch)
                session.backward(loss)
                session.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                run.log(loss=loss)
            model.eval()
            losses = []
            for batch in eval_loader:
                with torch.no_grad():
                    _, logits = model(**batch)
                logits, labels = session.gather_for_metrics((logits, batch["labels"]))
                losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
            run.log(eval_loss=torch.cat(losses).mean())
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
