"""SimCLR: each row is compared with the rows of all ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import hpctrain
from hpctrain.data import digits


def contrastive_loss(first, second, first_row):
    """Compare own rows, from `first_row` on, with all rows of the other view; temperature 0.5."""
    rows = torch.arange(len(first), device=first.device) + first_row
    return F.cross_entropy(first @ second.T / 0.5, rows)


args = hpctrain.options().parse_args()
with hpctrain.Session(args) as session:
    train_set, _ = digits()
    train_set = Subset(train_set, range(192))
    loader = DataLoader(train_set, batch_size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    with session.run() as run:
        for _ in run.epochs(2):
            for images, _ in run.batches(loader):
                with session.autocast():
                    features = model(torch.cat([images, images.roll(1, -1)]))
                    first, second = F.normalize(features, dim=1).chunk(2)
                    everyone = session.all_gather(second)
                    loss = contrastive_loss(first, everyone, session.world.rank * len(first))
                session.step(loss)
                run.log(loss=loss)
    if session.is_main:
        torch.save(model.state_dict(), "model.pt")
