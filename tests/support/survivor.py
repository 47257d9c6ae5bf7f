"""A training script as a user writes one, with faults on request.

Its loop draws random numbers from torch, NumPy and Python, its model has batch norm and dropout,
and its optimizer has a schedule. In the run directory it writes

ledger-RANK.jsonl  a line for each step that a rank has taken: `step` (from 0), the `ids` of its
                   samples, `start` (from 0; of several lines of a step, that of the last start
                   counts), `draws` and `state`, to compare this rank's random numbers, weights and
                   buffers with another run, and the `time` of its end
begins.jsonl       a line for each start that began to train: `start`, its first `step`, and the
                   newest step with a checkpoint that is `committed` then
final.pt           at the end, atomically: model, optimizer and schedule of rank 0

and has the options of every training script, and `--fault KIND[=SECONDS]@PLACE[:rankN][:always]`,
which may be repeated:

KIND   kill, stop, term, usr1, usr2, int: a signal to this rank, SECONDS later by a thread
       usr2-all, term-all: also to its child processes, as Slurm does to a step; kill-parent: to its
       launcher, the parent of the process that has started it
       file: the stop file $HPCTRAIN_STOP_FILE; request: the file `stop` of the run directory
       crash: an exception; sleep, gil: for SECONDS, without and with Python's lock held; hold:
       until the file RUN.release exists
       nan, overflow: a loss of NaN or infinity
       flip: a flipped bit of a weight, only at PLACE N
PLACE  N: before the backward pass of step N, from 0; imports, opened, entered: before the session,
       after it, and when the run has resumed; evalN: in the evaluation of epoch N; saveN: in the
       first save at step N or later

A fault happens on all ranks, or with `:rankN` on one; and in one start, or with `:always` in all.
"""

import ctypes
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hpctrain
from hpctrain.process.pytree import map_tensors

_SIGNALS = {name: getattr(signal, f"SIG{name.upper()}") for name in ("term", "usr1", "usr2", "int")}
_SIGNALS |= {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fault:
    """One `--fault` of this rank.

    Args:
        text: of the option.
        args: of the script.
        rank: of this process.

    Attributes:
        flipped: the tensor of which `flip` changes a bit.
    """

    flipped = None

    def __init__(self, text, args, rank):
        what, place = text.split("@")
        self.kind, _, seconds = what.partition("=")
        self.seconds = float(seconds or 0)
        self.place, *more = place.split(":")
        self.always = "always" in more
        self.on_this_rank = not [m for m in more if m.startswith("rank")] or f"rank{rank}" in more
        self.run = Path(args.run_dir)
        # Beside the run directory, which does not exist before the run.
        self.mark = Path(f"{args.run_dir}.faults", f"{text}-of-{rank}".replace("/", "_"))

    def due(self, place):
        """Return whether the fault happens at this place, and has not happened yet."""
        if not self.on_this_rank or not self._matches(place):
            return False
        if not self.always:
            self.mark.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.mark.touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def _matches(self, place):
        if self.place.startswith("save") and place.startswith("save"):
            return int(place[4:]) >= int(self.place[4:])
        return self.place == place

    def happen(self):
        """Cause the fault; return the factor of the loss."""
        name, _, all_of_them = self.kind.partition("-")
        if name in _SIGNALS:
            if self.seconds:
                threading.Timer(self.seconds, self._signal, [name, all_of_them]).start()
            else:
                self._signal(name, all_of_them)
        elif name == "file":
            Path(os.environ["HPCTRAIN_STOP_FILE"]).touch()
        elif name == "request":
            (self.run / "stop").touch()
        elif name == "crash":
            raise RuntimeError("a planned crash of this script")
        elif name == "sleep":
            time.sleep(self.seconds)
        elif name == "hold":
            while not Path(f"{self.run}.release").exists():
                time.sleep(0.01)
        elif name == "flip":
            self.flipped.numpy().view("int32").flat[0] ^= 1  # unseen by autograd
        elif name == "gil":
            ctypes.PyDLL(None).sleep(int(self.seconds))
        return {"nan": float("nan"), "overflow": float("inf")}.get(name, 1.0)

    def _signal(self, name, whom):
        if whom == "parent":
            os.kill(_launcher(), _SIGNALS[name])
        elif whom == "all":
            # By another process, because a worker obeys signals of the rank that started it.
            pids = map(str, [*descendants(os.getpid()), os.getpid()])
            subprocess.run(["kill", f"-{name.upper()}", *pids], check=True)
        else:
            os.kill(os.getpid(), _SIGNALS[name])


def _launcher():
    """Return the process id of `hpctrain run` or of its agent."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def descendants(process):
    """Return the ids of all running descendants of a process."""
    found = []
    for table in Path(f"/proc/{process}/task").glob("*/children"):
        for child in table.read_text().split():
            found += [*descendants(int(child)), int(child)]
    return found


class Faults:
    """The faults of this rank."""

    def __init__(self, args, rank):
        self._faults = [Fault(text, args, rank) for text in args.fault]

    def at(self, place):
        """Cause the faults of a place; return the factor of the loss there."""
        factor = 1.0
        for fault in self._faults:
            if fault.due(str(place)):
                factor *= fault.happen()
        return factor


class Bars(Dataset):
    """Noise with a bright bar whose row is the class, augmented; and the id of the sample.

    Args:
        samples: the number of samples.
        seed: of the images.
        augmented: whether samples are augmented with random numbers.
    """

    def __init__(self, samples, seed, augmented):
        self.random = augmented
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(samples) % 8
        self.images = torch.rand(samples, 1, 8, 8, generator=generator)
        self.images[torch.arange(samples), 0, self.targets] += 0.5

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index]
        if self.random:
            image = image.roll(int(numpy.random.randint(3)), 2) * random.uniform(0.8, 1.2)
            image = image + 0.1 * torch.randn(1, 8, 8)
        return image, self.targets[index], index


class Net(nn.Sequential):
    """A model with batch norm, dropout, and several layers for the sums over the ranks."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 8)),
        )


class SampleCounter:
    """State of the script in the checkpoint: the number of samples that this rank has seen.

    Args:
        faults: of this rank; those of a save happen here.
    """

    def __init__(self, faults):
        self.samples = 0
        self.run = None
        self._faults = faults

    def state_dict(self):
        if self.run is not None:
            self._faults.at(f"save{self.run.step}")
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


class Ledger:
    """The samples of this rank, a line for each step; rank 0 also records where starts begin.

    Args:
        session: of the run.
        run: before its first step.
    """

    def __init__(self, session, run):
        path = run.directory.path
        last = -1
        if session.is_main:
            for file in (*path.glob("ledger-*.jsonl"), *path.glob("begins.jsonl")):
                starts = [json.loads(line)["start"] for line in file.read_text().splitlines()]
                last = max([last, *starts])
        self.start = session.sum(last + 1 if session.is_main else 0)
        if session.is_main:
            committed = [int(folder.name[5:]) for folder in path.glob("checkpoints/step-*")]
            begin = {"committed": max(committed, default=0), "step": run.step}
            with open(path / "begins.jsonl", "a") as file:
                file.write(json.dumps({"start": self.start, **begin}) + "\n")
        self._file = open(path / f"ledger-{session.world.rank}.jsonl", "a")  # noqa: SIM115
        self._ids, self._draws = [], []

    def consumed(self, ids, *draws):
        """Record a micro-batch, and the random numbers that the loop drew for it."""
        self._ids += ids.tolist()
        self._draws += draws

    def step(self, number, model):
        """Write the line of a finished step."""
        state = hashlib.blake2b(digest_size=8)
        for tensor in model.state_dict().values():
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            state.update(own.detach().cpu().double().numpy().tobytes())
        line = {"step": number, "ids": self._ids, "start": self.start}
        line |= {"draws": self._draws, "state": state.hexdigest(), "time": time.time()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._ids, self._draws = [], []


def evaluate(session, model, loader, faults, epoch):
    """Return top-1 and loss over the test set."""
    model.eval()
    correct = count = loss = 0
    with torch.no_grad():
        for images, targets, _ in loader:
            with session.autocast():
                scores = model(images)
            correct += (scores.argmax(1) == targets).sum().item()
            loss += F.cross_entropy(scores.double(), targets, reduction="sum").item()
            count += len(targets)
        faults.at(f"eval{epoch}")
        correct, count, loss = session.sum(correct, count, loss)
    model.train()
    return {"top1": correct / count, "eval_loss": loss / count}


def write_result(session, run, model, optimizer, schedule):
    """Write final.pt atomically on rank 0, with whole tensors."""
    result = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }
    result = map_tensors(session.backend.whole, result)  # called by all ranks
    if not session.is_main:
        return
    path = run.directory.path / "final.pt"
    torch.save(result, path.with_name(".final.pt"))
    path.with_name(".final.pt").replace(path)


def options(argv):
    parser = hpctrain.options(description="A training with faults on request.")
    parser.set_defaults(checkpoint_minutes=1000.0)  # an interval, so each epoch ends with a save
    own = parser.add_argument_group("of this script")
    own.add_argument("--lr", type=float, default=0.05)
    own.add_argument("--optimizer", choices=("adam", "sgd"), default="sgd")
    own.add_argument("--samples", type=int, default=100, help="of the training set")
    own.add_argument("--pace", type=float, default=0.0, help="seconds that a step waits")
    own.add_argument("--context", help="how loader workers start: fork, spawn, forkserver")
    own.add_argument("--fault", action="append", default=[], help="see the text above the code")
    own.set_defaults(global_batch=12, epochs=3, log_every=1, run_dir="run")
    return parser.parse_args(argv)


def main(argv=None):
    args = options(argv)
    rank = hpctrain.detect().rank
    faults = Faults(args, rank)
    random.seed(args.seed + rank)
    numpy.random.seed(args.seed + rank)
    faults.at("imports")
    with hpctrain.Session(args) as session:
        faults.at("opened")
        train(session, args, faults)


def train(session, args, faults):
    context = {"multiprocessing_context": args.context} if args.context else {}
    loader = session.loader(Bars(args.samples, 1, augmented=True), **context)
    test_loader = session.loader(Bars(60, 2, augmented=False), train=False, **context)
    model = Net()
    kinds = {
        "adam": lambda: torch.optim.Adam(model.parameters(), args.lr / 10),
        "sgd": lambda: torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=1e-4),
    }
    model, optimizer = session.prepare(model, kinds[args.optimizer]())
    Fault.flipped = next(model.parameters()).detach()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    counted = SampleCounter(faults)
    with session.run(state={"schedule": schedule, "counted": counted}) as run:
        counted.run = run
        ledger = Ledger(session, run)
        faults.at("entered")
        for epoch in run.epochs():
            for images, targets, ids in run.batches(loader):
                mix, order = random.uniform(0.7, 1), numpy.random.permutation(len(images))
                mixed = mix * images + (1 - mix) * images[order]
                with session.autocast():
                    scores = model(mixed)
                    loss = mix * F.cross_entropy(scores, targets)
                    loss = loss + (1 - mix) * F.cross_entropy(scores, targets[order])
                done = session.step(loss * faults.at(run.step))
                run.log(loss=loss)
                counted.samples += len(images)
                ledger.consumed(ids, mix, int(order[0]))
                if done:
                    schedule.step()
                    ledger.step(run.step - 1, model)
                    time.sleep(args.pace)
            run.log(**evaluate(session, model, test_loader, faults, epoch))
        write_result(session, run, model, optimizer, schedule)


if __name__ == "__main__":
    main(sys.argv[1:])
