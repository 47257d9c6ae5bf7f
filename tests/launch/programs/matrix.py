"""Run programs that do not know hpctrain by `hpctrain run` in each place; check that ranks agree.

    python tests/launch/programs/matrix.py [--only PROGRAM …] [--sources DIR] [--save FILE]

The scripts of this folder are small ones in the manner of each library. With --sources, the
published scripts of `PUBLISHED` run too, unchanged, from clones of their repositories in DIR. A
program whose packages are missing is left out, and so are hosts of Slurm where none can be started.
`python benchmarks/pages` makes the table of docs/programs.md from docs/results/programs.json.
"""

import argparse
import importlib.util
import json
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[2]
sys.path += [str(TOP), str(TOP / "tests" / "support")]

import cluster as slurm  # noqa: E402
import launches  # noqa: E402

LINE = re.compile(r"AGREES (\{.*?\})")
SECONDS = 300
# With gloo, torch may abort a rank while its Python ends, under torchrun too; probably as a thread
# of the group frees a tensor, which needs Python's lock (pytorch/pytorch#179291): docs/programs.md.
ABORT_OF_TORCH = "terminate called without an active exception"


@dataclass(frozen=True)
class Program:
    """A program that does not know hpctrain.

    Attributes:
        words: script and arguments. {here} is this folder, {sources} the folder of clones, {data}
            that of `make_data`; for {devices}, {nodes}, … see `Place`.
        packages: packages that it needs besides torch.
        even: whether each host needs the same number of ranks.
        only_in_slurm: whether it reads only variables of Slurm.
        environ: variables that it needs.
    """

    words: str
    packages: Sequence[str] = ()
    even: bool = False
    only_in_slurm: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


LAYOUT = "--devices {devices} --num-nodes {nodes}"
PROGRAMS = {
    "torch": Program("{here}/ddp.py"),
    "horovod": Program("{here}/horovod_mnist.py", ["horovod"]),
    "accelerate": Program("{here}/accelerate_loop.py", ["accelerate"]),
    "lightning": Program(f"{{here}}/lightning_trainer.py {LAYOUT}", ["lightning"], even=True),
    "lightning fabric": Program(f"{{here}}/lightning_fabric.py {LAYOUT}", ["lightning"], even=True),
    "transformers": Program("{here}/transformers_trainer.py", ["transformers", "accelerate"]),
    "timm": Program("{here}/timm_train.py", ["timm", "torchvision"]),
    "torchvision": Program("{here}/torchvision_train.py", ["torchvision"]),
    "script for srun": Program("{here}/srun_ddp.py", only_in_slurm=True),
}
OBSERVED = "{here}/observed.py {sources}"
LIGHTNING = f"{OBSERVED}/pytorch-lightning/examples"
PUBLISHED = {
    "horovod: pytorch_mnist.py": Program(
        f"{OBSERVED}/horovod/examples/pytorch/pytorch_mnist.py --data-dir {{data}} --epochs 1 "
        "--batch-size 8 --no-cuda",
        ["horovod", "torchvision"],
    ),
    "lightning: imagenet.py": Program(
        f"{LIGHTNING}/pytorch/domain_templates/imagenet.py fit --model.data_path {{data}}/images "
        "--model.arch squeezenet1_1 --model.batch_size 12 --model.workers 0 "
        "--trainer.devices {devices} --trainer.num_nodes {nodes} --trainer.accelerator cpu "
        "--trainer.max_epochs 1",
        ["lightning", "torchvision", "jsonargparse"],
        even=True,
    ),
    "lightning: train_fabric.py": Program(
        f"{LIGHTNING}/fabric/image_classifier/train_fabric.py --epochs 1 --batch-size 8",
        ["lightning", "torchvision"],
        even=True,
        # What `fabric run` sets.
        environ={
            "LT_CLI_USED": "1",
            "LT_ACCELERATOR": "cpu",
            "LT_DEVICES": "{devices}",
            "LT_NUM_NODES": "{nodes}",
        },
    ),
}
EVERY = {**PROGRAMS, **PUBLISHED}
# The folder of Lightning's examples for data.
DATASETS = "pytorch-lightning/Datasets"


@dataclass(frozen=True)
class Place:
    """A place in which ranks start.

    Attributes:
        command: words before the program. {layout} is the number of ranks of each host, {ranks}
            their sum, {nodes} the number of hosts, {devices} the ranks of the first one.
        in_slurm: whether they start on hosts of a Slurm.
        in_batch: whether the command is in a batch script.
    """

    command: str
    in_slurm: bool = False
    in_batch: bool = False

    def layout(self, program: Program) -> tuple[int, ...]:
        """Return the number of ranks of each host."""
        if not self.in_slurm:
            return (3,)
        return (2, 2) if program.even else (2, 1)


PLACES = {
    "this machine": Place("hpctrain run --nproc-per-node {layout}"),
    "mpirun": Place("mpirun.openmpi --oversubscribe -np {ranks} hpctrain run"),
    "srun": Place(
        # Without the last option, Slurm may put three of four tasks on one host.
        "srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={devices} hpctrain run",
        in_slurm=True,
    ),
    "batch script": Place("hpctrain run --nproc-per-node {layout}", in_slurm=True, in_batch=True),
}


def missing(program: Program) -> str:
    """Return which package of a program is not installed; empty if all are."""
    return next((name for name in program.packages if not importlib.util.find_spec(name)), "")


def disagreement(output: str, layout: Sequence[int]) -> str:
    """Return why the ranks of a program do not agree; empty if they do.

    Args:
        output: what they have printed.
        layout: number of ranks of each host.
    """
    lines = [json.loads(found) for found in LINE.findall(output)]
    lines.sort(key=lambda line: line["rank"])
    size = sum(layout)
    expected = {
        "rank": list(range(size)),
        "size": [size] * size,
        "local_rank": [local for count in layout for local in range(count)],
        "sum": [size * (size + 1) / 2] * size,
    }
    for name, values in expected.items():
        found = [line[name] for line in lines if name in line]
        # A published script prints no sum.
        if found != values and (found or name != "sum"):
            return f"{name} {found}, and {values} is right"
    return "" if len({line["digest"] for line in lines}) == 1 else "different weights at the end"


def run(
    name: str,
    where: str,
    folder: Path,
    cluster: slurm.Cluster | None = None,
    data: Path = Path(),
    sources: Path = Path(),
) -> str:
    """Run a program in a place to its end; return why it has failed, empty if its ranks agree.

    Args:
        name: key of EVERY.
        where: key of PLACES.
        folder: folder in which it runs.
        cluster: Slurm, for a place that needs it.
        data: folder of `make_data`, for a published script.
        sources: folder of clones, for a published script.
    """
    program, place = EVERY[name], PLACES[where]
    layout = place.layout(program)
    fields = {
        "ranks": sum(layout),
        "layout": ",".join(map(str, layout)),
        "nodes": len(layout),
        "devices": layout[0],
        "here": HERE,
        "data": data,
        "sources": sources,
    }
    words = shlex.split(f"{place.command} {program.words}".format(**fields))
    at = words.index("hpctrain")
    words[at:at] = [launches.PYTHON, "-m"]
    environ = {name: value.format(**fields) for name, value in program.environ.items()}
    code, output = _ended(words, place, layout, folder, cluster, environ)
    reason = disagreement(output, layout)
    if not reason and (code == 0 or ABORT_OF_TORCH in output):
        return ""
    return f"{reason or f'exit code {code}'}\n{output}"


def _ended(
    words: Sequence[str],
    place: Place,
    layout: Sequence[int],
    folder: Path,
    cluster: slurm.Cluster | None,
    environ: Mapping[str, str],
) -> tuple[int, str]:
    """Run a command in a place to its end; return its exit code and output."""
    if not place.in_slurm:
        root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        done = launches.start(words, folder, SECONDS, **environ, **root)
        return done.returncode, done.stdout + done.stderr
    assert cluster is not None
    env = launches.on_cluster(cluster, **environ)
    if place.in_batch:
        log, script = folder / "log", folder / "job.sh"
        script.write_text(f"#!/bin/bash\nexec {shlex.join(words)}\n")
        options = [f"--nodes={len(layout)}", f"--output={log}", str(script)]
        _, code = cluster.batch(options, SECONDS, env=env, cwd=folder)
        return code, log.read_text()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = cluster.run(words, env=env, cwd=folder, timeout=SECONDS, **streams)
    return ended.returncode, ended.stdout


def make_data(folder: Path, sources: Path) -> None:
    """Write a few random images, as folders of classes and in the files of MNIST."""
    import numpy
    from PIL import Image

    chance = numpy.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("a", "b"):
            images = folder / "images" / split / label
            images.mkdir(parents=True)
            for number in range(12):
                pixels = chance.integers(0, 255, (40, 40, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(images / f"{number}.jpg")
    for top in (folder, sources / DATASETS):
        raw = top / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", 96), ("t10k", 24)):
            pixels = chance.integers(0, 255, (count, 28, 28), dtype=numpy.uint8)
            labels = chance.integers(0, 10, count, dtype=numpy.uint8)
            head = struct.pack(">4I", 2051, count, 28, 28)
            (raw / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
            head = struct.pack(">2I", 2049, count)
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


@contextmanager
def _slurm() -> Iterator[slurm.Cluster | None]:
    """Start a Slurm for a while, if that is possible here."""
    if reason := slurm.available():
        print(f"no hosts of Slurm: {reason}")
        yield None
        return
    started = slurm.Cluster(f"{slurm.NAME}-programs")
    started.start()
    try:
        yield started
    finally:
        started.stop()


def main() -> int:
    """Run the programs, print their table, and save it; return 1 if one of them has failed."""
    sys.path.append(str(TOP / "benchmarks"))
    import measure

    parser = argparse.ArgumentParser(description="Run foreign programs in each place.")
    parser.add_argument("--only", nargs="+", choices=EVERY, metavar="PROGRAM", default=list(EVERY))
    parser.add_argument("--sources", type=Path, metavar="DIR", help="clones of the repositories")
    measure.add_save(parser)
    options = parser.parse_args()
    sources = options.sources and options.sources.resolve()
    names = [name for name in options.only if sources or name in PROGRAMS]
    rows = []
    with tempfile.TemporaryDirectory(prefix="programs-") as temporary, _slurm() as cluster:
        data = Path(temporary, "data")
        if sources:
            make_data(data, sources)
        for name in names:
            row = [name]
            for where in PLACES:
                folder = Path(tempfile.mkdtemp(dir=temporary))
                row.append(_cell(name, where, folder, cluster, data, sources or Path()))
                print(f"{name}, {where}: {row[-1]}", flush=True)
            rows.append(row)
    packages = {package for name in names for package in EVERY[name].packages}
    clones = sorted(sources.glob("*/.git")) if sources else []
    record = {
        **measure.facts(["torch", *sorted(packages)]),
        **({"note": ", ".join(map(_commit, clones))} if clones else {}),
        "head": ["program", *PLACES],
        "rows": rows,
    }
    print(measure.table([record["head"], *rows]))
    measure.save(options.save, record)
    return any("failed" in cell for row in rows for cell in row)


def _commit(clone: Path) -> str:
    """Return the name and the commit of the clone with this folder of git."""
    command = ["git", "-C", str(clone.parent), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return f"{clone.parent.name} `{done.stdout.strip()}`"


def _cell(
    name: str,
    where: str,
    folder: Path,
    cluster: slurm.Cluster | None,
    data: Path,
    sources: Path,
) -> str:
    """Run a program in a place, and return its cell of the table."""
    program, place = EVERY[name], PLACES[where]
    if program.only_in_slurm and not place.in_slurm:
        return "–"
    if package := missing(program):
        return f"left out: no {package}"
    if place.in_slurm and cluster is None:
        return "left out: no Slurm"
    try:
        reason = run(name, where, folder, cluster, data, sources)
    except (AssertionError, OSError, slurm.ClusterError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if not reason:
        return f"{sum(place.layout(program))} ranks agree"
    print(reason)
    return f"failed: {reason.splitlines()[0]}"


if __name__ == "__main__":
    sys.exit(main())
