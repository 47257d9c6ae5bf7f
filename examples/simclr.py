"""SimCLR: features of images without their classes, and a linear classifier on the features."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hpctrain
from hpctrain.data import digits


class TwoViews(Dataset):
    """Two random views of each image of a data set."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, _ = self.images[index]
        return view_of(image), view_of(image)


def view_of(image):
    """Return an image (1, height, width) with another place, brightness, contrast, and noise."""
    top, left = torch.randint(0, 3, (2,)).tolist()
    moved = F.pad(image, (1, 1, 1, 1), mode="replicate")
    moved = moved[:, top : top + image.shape[1], left : left + image.shape[2]]
    brightness, contrast = torch.rand(2) - 0.5
    return moved * (1 + contrast) + brightness + 0.3 * torch.randn_like(moved)


class Model(nn.Module):
    def __init__(self, height, width):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * ((height + 1) // 2) * ((width + 1) // 2), 64),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, images):
        return self.head(self.encoder(images))


def contrastive(session, first, second, temperature=0.5):
    """Return the mean loss of this rank's rows (N, D), compared with the rows of all ranks.

    Source: arXiv 2002.05709, equation 1. Micro-batches that accumulate do not see each other.
    """
    own = F.normalize(torch.cat([first, second]))
    everyone = session.all_gather(own)  # (2N · world_size, D), in the order of ranks
    rows = torch.arange(len(own), device=own.device)
    begin = session.world.rank * len(own)  # own rows in those of all ranks
    partners = begin + (rows + len(first)) % len(own)
    alike = own @ everyone.T / temperature
    itself = F.one_hot(begin + rows, len(everyone)).bool()
    return F.cross_entropy(alike.masked_fill(itself, float("-inf")), partners)


def evaluate(session, model, train_loader, test_loader, classes):
    """Return the accuracy of a linear classifier on the features, fitted by least squares.

    Sums over all ranks replace the features of the whole training set.
    """
    model.eval()
    with torch.no_grad():
        inner = outer = correct = count = 0
        for images, targets in train_loader:
            features = F.pad(model.encoder(images).double(), (0, 1), value=1.0)
            inner = inner + features.T @ features
            outer = outer + features.T @ F.one_hot(targets, classes).double()
        inner, outer = session.all_reduce(inner), session.all_reduce(outer)
        weights = torch.linalg.solve(inner + 1e-3 * torch.eye(len(inner)).to(inner), outer)
        for images, targets in test_loader:
            features = F.pad(model.encoder(images).double(), (0, 1), value=1.0)
            correct += ((features @ weights).argmax(1) == targets).sum().item()
            count += len(targets)
    model.train()
    correct, count = session.sum(correct, count)
    return correct / count


def main():
    parser = hpctrain.options(description=__doc__)
    text = "learning rate (%(default)s)"
    parser.add_argument("--lr", type=float, default=1e-3, metavar="X", help=text)
    args = parser.parse_args()
    with hpctrain.Session(args) as session:
        train_set, test_set = digits()
        train_loader = session.loader(TwoViews(train_set))
        probe_loader = session.loader(train_set, train=False)
        test_loader = session.loader(test_set, train=False)
        model = Model(*train_set.size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        model, optimizer = session.prepare(model, optimizer)

        with session.run() as run:
            for _ in run.epochs(5):
                for first, second in run.batches(train_loader):
                    with session.autocast():
                        loss = contrastive(session, model(first), model(second))
                    session.step(loss)
                    run.log(loss=loss)
            top1 = evaluate(session, model, probe_loader, test_loader, train_set.classes)
            run.log(top1=top1)


if __name__ == "__main__":
    main()
