"""Ten scripts before and after they were ported: run them, and compare what they save.

    python tests/porting/ports.py [--only SCRIPT …] [--save FILE]

The scripts of `before` are in the manner of the examples of other libraries, those of `after` are
the same for hpctrain. `python benchmarks/pages` makes the table of docs/ported.md from
docs/results/ported.json.
"""

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
if __name__ == "__main__":
    sys.path += [str(TOP), str(TOP / "tests" / "support")]

import launches  # noqa: E402
import ranks  # noqa: E402
import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

SIZES = (1, 2, 3)
# Packages that a script needs, by its name.
PACKAGES = {
    "accelerate_nlp": ("accelerate",),
    "fabric_digits": ("lightning_fabric",),
    "horovod_digits": ("horovod",),
}
NAMES = sorted(path.stem for path in (HERE / "before").glob("*.py"))
# Sums over ranks are added in another order than in the script before.
TOLERANCE = 1e-4
# The step in whose middle or at whose end a run is killed, and how often it saves.
KILLED_AT, SAVED_EVERY = 7, 2


def missing(name):
    """Return the first package that a script needs and that is not installed; None if all are."""
    packages = PACKAGES.get(name, ())
    return next((one for one in packages if importlib.util.find_spec(one) is None), None)


def changed(name):
    """Return the lines of both scripts, and those removed and added, without empty lines.

    Indentation does not count.
    """
    before, after = (
        [line.strip() for line in (HERE / when / f"{name}.py").read_text().splitlines() if line]
        for when in ("before", "after")
    )
    marks = [line[0] for line in difflib.ndiff(before, after)]
    return len(before), len(after), marks.count("-"), marks.count("+")


def run_before(name, size, folder):
    """Run the script before, on ranks with the variables of torchrun; return what it saved."""
    folder.mkdir()
    script = HERE / "before" / f"{name}.py"
    if name.startswith("horovod"):
        command = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", str(size), script]
        done = launches.start(command, folder)
        assert done.returncode == 0, done.stderr
    else:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        torchrun = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_RUN_ID": "none",
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
        }
        run_ranks(size, folder, script, (), torchrun)
    return torch.load(folder / "model.pt")


def run_after(name, size, folder, *options):
    """Run the script after in a new folder, with a run directory `run`; return what it saved."""
    folder.mkdir(exist_ok=True)
    options = ("--run-dir", "run", *options)
    run_ranks(size, folder, HERE / "after" / f"{name}.py", options)
    return torch.load(folder / "model.pt")


def run_killed(name, size, folder):
    """Run the script after until all its ranks are killed; return the step of its checkpoint."""
    folder.mkdir()
    options = ("--run-dir", "run", "--deterministic", "--checkpoint-every", str(SAVED_EVERY))
    ends = start_ranks(size, folder, HERE / "after" / f"{name}.py", options, killed=True)
    assert all(isinstance(end, RuntimeError) for end in ends), ends
    assert not (folder / "model.pt").exists()
    saved = folder.glob("run/checkpoints/step-*/manifest.json")
    return max(int(path.parent.name.removeprefix("step-")) for path in saved)


def resumed_from(folder):
    """Return the steps from which the starts of a run went on."""
    return [json.loads(line)["step"] for line in (folder / "run/starts.jsonl").open()]


def difference(one, other):
    """Return the norm of the difference of all weights that scripts have saved, to their norm."""
    a, b = (torch.cat([tensor.flatten() for tensor in tensors(each)]) for each in (one, other))
    return ((a - b).norm() / a.norm()).item()


def same_bits(one, other):
    """Return whether two things that scripts have saved have the same tensors."""
    return all(map(torch.equal, tensors(one), tensors(other)))


def tensors(saved):
    """Return the tensors of a `state_dict()`, or of a list of them."""
    states = saved if isinstance(saved, list) else [saved]
    return [state[name].double() for state in states for name in sorted(state)]


def run_ranks(*arguments):
    """Run a script on ranks to its end; raise the first error."""
    return ranks.values(start_ranks(*arguments))


def start_ranks(size, folder, script, options=(), env=None, killed=False):
    """Run a script on ranks; return how each of them ended."""
    with contextlib.chdir(folder):
        return ranks.run(size, run_as_rank, script, options, killed, env=env)


def run_as_rank(script, options, killed):
    """Run a script in this process, as a launcher starts it."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = os.environ["HPCTRAIN_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["HPCTRAIN_WORLD_SIZE"]
    if killed:
        kill_later()
    sys.argv = [str(script), *options]
    output = Path(f"output-{os.environ['RANK']}")
    with output.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")


def kill_later():
    """Kill this process behind a step of an optimizer, when the run has a checkpoint."""
    left = KILLED_AT

    def count(*_):
        nonlocal left
        left -= 1
        if not left:
            deadline = time.monotonic() + 60
            while not any(Path("run/checkpoints").glob("step-*/manifest.json")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


# What a user had to know besides the tables of docs/migrate.md.
KNOWN = {
    "accelerate_nlp": "accelerate steps a schedule once for each rank; the port once for each step",
    "ddp_weighted": "the sampler gives the order of all ranks; hpctrain divides it, by batches",
    "fabric_digits": "`accumulate=2` replaces the `if` and the division of the loss",
    "gan": "the generator of the noise is a part of `state=`",
    "gpt": "the body of `run.steps` runs for each micro-batch; `state=` takes a generator",
    "horovod_digits": "–",
    "sam": "`session.prepare` takes the base optimizer",
    "simclr": "`session.all_gather` returns one tensor",
    "stream": "–",
    "unused": "–",
}
HEAD = [
    *("script", "lines before", "lines after", "removed", "added"),
    *(f"same numbers, {size} rank{'s' * (size > 1)}" for size in SIZES),
    *("resumed bits equal", "to know"),
]


def row(name, folder):
    """Return the row of a script in the table."""
    if package := missing(name):
        return [name, *map(str, changed(name)), *[f"left out: no {package}"] * 4, KNOWN[name]]
    cells = []
    for size in SIZES:
        before = run_before(name, size, folder / f"before-{size}")
        after = run_after(name, size, folder / f"after-{size}", "--deterministic")
        found = difference(before, after)
        cells.append(f"{'yes' if found < TOLERANCE else 'no'}, {found:.0e}")
    killed = folder / "killed"
    run_killed(name, SIZES[-1], killed)
    resumed = run_after(name, SIZES[-1], killed, "--deterministic", "--resume")
    cells.append("yes" if same_bits(after, resumed) else "no")
    return [name, *map(str, changed(name)), *cells, KNOWN[name]]


def main():
    """Run the scripts, print their table, and save it."""
    sys.path.append(str(TOP / "benchmarks"))
    import measure

    parser = argparse.ArgumentParser(description="Compare ported scripts with those before.")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="SCRIPT", default=NAMES)
    measure.add_save(parser)
    options = parser.parse_args()
    rows = []
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="ports-") as folder:
            rows.append(row(name, Path(folder)))
        print(*rows[-1], sep=" | ", flush=True)
    packages = ["torch", *sorted({one for name in options.only for one in PACKAGES.get(name, ())})]
    measure.save(options.save, {**measure.facts(packages), "head": HEAD, "rows": rows})


if __name__ == "__main__":
    main()
