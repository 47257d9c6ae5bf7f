"""Training on a stream: samples from files that each rank reads in part."""

import random
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import hpctrain
from hpctrain.data import digits

try:
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
except ImportError:  # with --workers, a resumed run then reads the batches of its epoch again
    from torch.utils.data import DataLoader


def options():
    parser = hpctrain.options(description=__doc__)
    group = parser.add_argument_group("options of this example")
    text = "folder of train-*.csv and test.csv; if it is missing, the digits are written there"
    group.add_argument(
        "--data", type=Path, default="data/lines", metavar="FOLDER", help=f"{text} (%(default)s)"
    )
    group.add_argument("--lr", type=float, default=1e-3, metavar="X", help="(%(default)s)")
    return parser


def write(folder, files=16):
    """Write the digits as lines of a class and 64 pixels, the training set to unequal files."""
    if folder.exists():
        return
    part = folder.with_name(f".{folder.name}.part")  # renamed when it is whole
    part.mkdir(parents=True, exist_ok=True)
    rows = [torch.cat([one.targets[:, None], one.images.flatten(1)], 1) for one in digits()]
    cuts = [len(rows[0]) * number**2 // files**2 for number in range(1, files)]
    names = [*(f"train-{number:02d}.csv" for number in range(files)), "test.csv"]
    for name, lines in zip(names, [*rows[0].tensor_split(cuts), rows[1]], strict=True):
        text = "\n".join(",".join(map(str, line)) for line in lines.tolist())
        (part / name).write_text(text)
    part.rename(folder)


def sample_of(line):
    target, *pixels = map(int, line.split(","))
    return torch.tensor(pixels) / 16, target


class Lines(IterableDataset):
    """Samples of every n-th file, for n workers of all ranks, in a new order in each epoch."""

    def __init__(self, files, world, seed):
        self.files, self.world, self.seed = files, world, seed
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Begin an epoch; `run.batches` calls it."""
        self.epoch, self.given = epoch, 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first, step = self.world.rank * workers + number, self.world.world_size * workers
        draw = random.Random(f"{self.seed} {self.epoch}")  # the same on all ranks and workers
        files = draw.sample(self.files, len(self.files))[first::step]
        texts = (file.read_text().splitlines() for file in files)
        lines = (line for text in texts for line in draw.sample(text, len(text)))
        for line in islice(lines, self.given, None):  # a resumed run goes on behind those given
            self.given += 1
            yield sample_of(line)


def model_of():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def evaluate(session, model, loader):
    scores = session.classification(10)
    model.eval()
    with torch.no_grad(), session.autocast():
        for pixels, targets in loader:
            scores.update(model(pixels), targets)
    model.train()
    return scores.compute()


def main():
    args = options().parse_args()
    with hpctrain.Session(args) as session:
        session.on_main(lambda: write(args.data))
        files = sorted(args.data.glob("train-*.csv"))
        stream = Lines(files, session.world, session.options.seed)
        workers = {"num_workers": session.workers, "drop_last": True}
        train_loader = DataLoader(stream, session.batches.batch_size, **workers)
        test_set = [sample_of(line) for line in (args.data / "test.csv").read_text().splitlines()]
        test_loader = session.loader(test_set, train=False)
        model = model_of()
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        model, optimizer = session.prepare(model, optimizer)

        with session.run() as run:
            for _ in run.epochs(5):
                for pixels, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(pixels), targets)
                    session.step(loss)
                    run.log(loss=loss)
                run.log(**evaluate(session, model, test_loader).metrics())


if __name__ == "__main__":
    main()
