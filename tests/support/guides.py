"""The commands of the guides: where each is run, and the folder with what the pages speak of."""

import re

import launches
import pages

# Pages whose commands other tests of this folder run.
ELSEWHERE = ("README.md", "README.zh-CN.md", "docs/start.md", "docs/migrate.md", "docs/zh/")
GUIDES = [page for page in pages.PAGES if not page.startswith(ELSEWHERE)]

# Commands that no test runs as they are printed, by their beginning, and why not.
NOT_HERE = {
    "bash examples/quickstart.sh": "makes an environment; the test of the README runs it",
    "bash tests/run.sh": "runs the tests",
    ".venv/bin/python -m mkdocs build": "the test of the site builds it",
    ".venv/bin/python -m http.server": "serves until it is stopped",
    ".venv/bin/python -m pytest": "runs the tests",
    "apt-get install": "needs a network",
    "pip install": "needs a network",
    "python3 -m venv": "tests/source/test_package.py installs the package",
    "python -m venv": "tests/source/test_package.py installs the package",
    "$WORK/env/bin/pip install": "needs a network",
    "python3 -m pip": "needs a network",
    "apptainer exec": "needs an image",
    "module load": "names modules of the reader's cluster",
    "python -c": "needs the archives of ImageNet",
    "python examples/ladder.py": "takes minutes; the tests of the examples run it with few steps",
    "conda-pack": "needs conda",
    "tar -C .venv": "packs an environment of gigabytes; the tests of staging pack a small one",
    "hpctrain horovod build": "compiles for minutes; tests/tools/test_horovod_build.py runs it",
    "horovodrun -np 4 -H": "needs hosts with ssh; tests/backends/test_horovod_on_slurm.py has them",
    "hpctrain run --nodes 2 --node-rank": "one line for each host; "
    "tests/launch/test_manual_run_on_hosts.py types both",
    "hpctrain run train_with_lightning.py": "needs Lightning; tests/porting has its scripts",
    "tail -f": "does not end",
    "python sbatch/acceptance/chaos.py": "takes 40 minutes; tests/tools/test_chaos.py has fewer",
    "touch runs/": "stops a run at work; the tests of stops make the file",
    "hpctrain status 4712": "shows a job that waits for days",
}

# Commands that need Slurm begin with these words, and so do those that need a job.
_ON_SLURM = re.compile(
    r"(HPCTRAIN_RUN_DIR=\S+ )?(sbatch|srun|hpctrain (submit|status|logs|cancel|requeue)) ?"
    r"|hpctrain report 4711|exec "
)


# Sizes that the pages leave open, put after what a command begins with or has.
SMALLER = {
    "bench": "--seconds 1",
    "examples/imagenet.py": "--model resnet18 --train-crop 32 --val-crop 32 --val-resize 36 "
    "--batch-size 4 --max-steps 2 --workers 0 --lr-warmup-epochs 0",
    "examples/photographs.py": "--train 3 --val 2 --classes 3",
}
_PLACES = re.compile(r"/(tmp|scratch|datasets)/")

# What the pages call train.py: a model and a data set that are small.
TRAIN = """\
import torch

import hpctrain

parser = hpctrain.options()
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()
with hpctrain.Session(args) as session:
    samples = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    loader = session.loader(torch.utils.data.TensorDataset(samples, samples.sum(1, keepdim=True)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer = session.prepare(model, optimizer)
    with session.run() as run:
        for _ in run.epochs(2):
            for inputs, targets in run.batches(loader):
                with session.autocast():
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                session.step(loss)
                run.log(loss=loss)
"""
# The scripts of other pages that a page means by these names.
_SCRIPTS = {
    "common.py": "common.py",
    "ddp.py": "ddp.py",
    "train_with_accelerate.py": "accelerate_manual.py",
    "horovod_script.py": "horovod_manual.py",
}


def typed(page):
    """Return the commands that a reader types: those of all blocks that are no scripts."""
    return [
        command
        for block in pages.blocks(page, *pages.SHELLS)
        if not pages.is_script(block)
        for command in pages.commands(block)
    ]


def reason(command):
    """Return why no test runs a command as it is printed, or nothing."""
    return next((why for start, why in NOT_HERE.items() if command.startswith(start)), "")


def runnable(slurm):
    """Return the commands that tests run as they are printed, by page: those on Slurm, or not."""
    found = {
        page: [
            command
            for command in typed(page)
            if bool(_ON_SLURM.match(command)) == slurm and not reason(command)
        ]
        for page in GUIDES
    }
    return {page: commands for page, commands in found.items() if commands}


def small(command):
    """Return a command with small sizes, and with places below the folder of the reader."""
    more = [options for name, options in SMALLER.items() if name in command.split()]
    return " ".join([_PLACES.sub("", command), *more])


def prepare(folder):
    """Write what the pages speak of into a folder."""
    launches.checkout(folder)
    printed = {
        block.text.split()[1]: block.text for block in pages.blocks("docs/migrate.md", "python")
    }
    for name, source in _SCRIPTS.items():
        (folder / name).write_text(printed[source])
    (folder / "train.py").write_text(TRAIN)
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(TRAIN)
    (folder / "train").write_text('#!/bin/sh\nexec python train.py "$@"\n')
    (folder / "train").chmod(0o755)
    script = next(filter(pages.is_script, pages.blocks("docs/jobs.md", "bash")))
    (folder / "train.sh").write_text(script.text)
    (folder / ".venv").symlink_to(launches.BIN.parent)
    job, *_ = pages.blocks("docs/jobs.md", "toml")
    (folder / "job.toml").write_text(job.text)
