"""The MNIST loop of the tutorials."""

import torch
import torch.nn.functional as F
from torch import nn

import hpctrain
from hpctrain.data import digits


def load(name):
    """Return the training set and the test set."""
    if name == "digits":
        return digits()
    from torchvision import datasets
    from torchvision.transforms.functional import to_tensor

    if name == "synthetic":
        return [datasets.FakeData(size, (1, 28, 28), 10, to_tensor) for size in (4096, 1024)]
    return [datasets.FashionMNIST(name, train, to_tensor) for train in (True, False)]


class Net(nn.Module):
    def __init__(self, height, width):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.linear = nn.Linear((height // 4) * (width // 4) * 32, 10)

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
    text = "digits, synthetic, or the folder of torchvision's Fashion-MNIST (%(default)s)"
    parser.add_argument("--data", default="digits", help=text)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    with hpctrain.Session(args) as session:
        train_set, test_set = load(args.data)
        train_loader = session.loader(train_set)
        test_loader = session.loader(test_set, train=False)
        model = Net(*train_set[0][0].shape[1:])
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
