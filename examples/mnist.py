"""The MNIST loop of the tutorials."""

import torch
import torch.nn.functional as F
from torch import nn

import hpctrain
from hpctrain.data import load


class Net(nn.Module):
    def __init__(self, height, width, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.linear = nn.Linear((height // 4) * (width // 4) * 32, classes)

    def forward(self, images):
        images = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        images = F.max_pool2d(F.relu(self.norm2(self.conv2(images))), 2)
        return self.linear(images.flatten(1))


def evaluate(session, model, loader):
    model.eval()
    correct = count = 0
    with torch.no_grad():
        for images, targets in loader:
            correct += (model(images).argmax(1) == targets).sum().item()
            count += len(targets)
    model.train()
    correct, count = session.sum(correct, count)
    return correct / count


def main():
    parser = hpctrain.options(description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    with hpctrain.Session(args) as session:
        train_set, test_set = load(args.data, args.download)
        train_loader = session.loader(train_set)
        test_loader = session.loader(test_set, train=False)
        model = Net(*train_set.size, train_set.classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        model, optimizer = session.prepare(model, optimizer)

        with session.run() as run:
            for _ in run.epochs(5):
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    run.log(loss=loss)
                run.log(top1=evaluate(session, model, test_loader))


if __name__ == "__main__":
    main()
