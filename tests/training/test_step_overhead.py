"""The overhead of a start and a step: Python calls of hpctrain, and memory that it keeps.

The number of calls does not depend on the load of the machine, so a few more are detected.
"""

import gc
import os
import statistics
import sys
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
import torch
from battery import images, small_model
from torch import nn

import hpctrain
from hpctrain.cluster import entry_points, launchers

PACKAGE = str(Path(hpctrain.__file__).parent)
INSIDE = f"{PACKAGE}/*"
WARM_UP, STEPS = 20, 60
OPTIONS = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "accumulate, clip, deterministic": {
        "precision": "fp32", "accumulate": 2, "clip_norm": 1.0, "deterministic": True,
    },
}  # fmt: skip
# Calls of Python and C functions that code of hpctrain makes or receives in one step. If a larger
# number is worth it, write it here and state the reason in the commit.
CALLS = {"fp32": 61, "fp16": 85, "accumulate, clip, deterministic": 165}
UPWARD = 1.03
# From `session.step` to the backward pass, so that a reader can follow the way of the loss.
FILES = 5
# The same from the opening of a session to the end of the first step, whose files and threads vary.
CALLS_OF_A_START, UPWARD_OF_A_START = 3230, 1.1
# Blocks of memory that a step may keep: one time of a step, for half a minute, and one or two of
# torch where hpctrain makes a tensor. All others are a leak.
BLOCKS = 2.9


def steps(options, warm_up=WARM_UP):
    """Train, and yield once in each step after the warm-up."""
    with hpctrain.Session(
        backend=os.environ.get("TEST_BACKEND", "auto"),
        batch_size=4,
        max_steps=WARM_UP + STEPS,
        log_every=1000,
        run_dir="run",
        **OPTIONS[options],
    ) as session:
        model = small_model()
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.01, 0.9))
        loader = session.loader(images(1000))
        with session.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    with session.autocast():
                        loss = nn.functional.cross_entropy(model(batch), targets)
                    done = session.step(loss)
                    run.log(loss=loss)
                    if done and run.step > warm_up:
                        yield


@contextmanager
def count_package_calls():
    """Count calls; yield a function that returns how many there were since its last call."""
    count = 0

    def inside(frame):
        return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)

    def profile(frame, event, argument):
        nonlocal count
        del argument
        if event == "call":
            count += inside(frame) or inside(frame.f_back)
        elif event == "c_call":
            count += inside(frame)

    def take():
        nonlocal count
        taken, count = count, 0
        return taken

    sys.setprofile(profile)
    try:
        yield take
    finally:
        sys.setprofile(None)


def count_calls(options):
    """Return the median over the steps; some steps do more, such as a check."""
    training = steps(options)
    next(training)
    with count_package_calls() as take:
        return statistics.median([take() for _ in training])


def count_calls_of_a_start():
    # What depends on the machine: the modules beside a script, and the installed packages.
    vars(sys.modules["__main__"]).pop("__file__", None)
    entry_points.found(entry_points.LAUNCHERS)
    launchers.survey({})
    training = steps("fp32", warm_up=0)
    with count_package_calls() as take:
        next(training)
        calls = take()
    training.close()
    return calls


def test_python_calls_of_a_start():
    (calls,) = ranks.values(ranks.run(1, count_calls_of_a_start))
    assert calls <= UPWARD_OF_A_START * CALLS_OF_A_START, calls


@pytest.mark.parametrize("options", OPTIONS)
def test_python_calls_of_a_training_step(options):
    (calls,) = ranks.values(ranks.run(1, count_calls, options))
    assert calls <= UPWARD * CALLS[options], (
        f"a step with {options} makes {calls} calls, {CALLS[options]} were usual; if that is worth "
        f"it, write the new number into CALLS of {Path(__file__).name}"
    )


def files_to_the_backward_pass():
    """Return the files of hpctrain whose functions run between `session.step` and autograd."""
    found, counts = set(), []

    def profile(frame, event, argument):
        del argument
        code = frame.f_code
        if event == "call" and code is torch.Tensor.backward.__code__:
            counts.append(sorted(found))
        elif event == "call" and code is hpctrain.Session.step.__code__:
            found.clear()
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    training = steps("fp32")
    next(training)
    sys.setprofile(profile)
    for _ in training:
        pass
    sys.setprofile(None)
    return counts


@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp", "horovod"])
def test_five_files_lead_from_a_step_to_its_backward_pass(backend):
    size, env = 1 if backend == "single" else 2, {"TEST_BACKEND": backend}
    for counts in ranks.values(ranks.run(size, files_to_the_backward_pass, env=env)):
        assert len(counts) > STEPS / 2
        assert max(map(len, counts)) <= FILES, max(counts, key=len)


def count_blocks(options):
    """Return the memory blocks that hpctrain allocates and keeps in each step."""
    tracemalloc.start()
    blocks = []
    for number, _ in enumerate(steps(options)):
        if number in (0, STEPS // 2):
            gc.collect()
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, INSIDE)])
            blocks.append(sum(entry.count for entry in snapshot.statistics("lineno")))
    tracemalloc.stop()
    return (blocks[1] - blocks[0]) / (STEPS // 2)


def test_memory_kept_by_a_training_step():
    (blocks,) = ranks.values(ranks.run(1, count_blocks, "fp32"))
    assert blocks <= BLOCKS, f"each step leaves {blocks} blocks of memory behind"
