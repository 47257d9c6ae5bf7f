"""Random loops of scripts train as plain torch does over the whole batch of each step."""

import gc
import tempfile
import traceback
from pathlib import Path

import pytest
import ranks
import step_sequences
from hypothesis import HealthCheck, Phase, given, settings
from step_sequences import Program, expected, trained

# Programs that are always run. To run a program alone that has failed, write it here, and select
# `-k listed`.
LISTED = [
    Program(accumulate=2, epochs=("...", ".s.b"), loop="Z B1 S", optimizers=("AdamW",)),
    Program(epochs=("...", ".B."), loop="Bg Sg Zd Bd Sd Zg", optimizers=("SGD", "AdamW")),
    # A stop in a batch that is left by break: the resumed run begins the next epoch.
    Program(epochs=(".B..", "..."), stops=(("signal", 2),)),
    Program(epochs=("..B.", "..."), every=3, stops=(("late crash", 5),)),
    # The script calls the scheduler at the end of an epoch that --max-steps cuts short.
    Program(epochs=("....", ".."), schedule="StepLR", ticks="epoch", stops=(("max_steps", 2),)),
    # The last pass of a step does not use one of the models that its micro-batch has called.
    Program(
        seed=73,
        samples=3,
        accumulate=2,
        epochs=("........",),
        loop="Zd Zg Bg Bd Sd Sg",
        optimizers=("AdamW", "AdamW"),
        stops=(("max_steps", 1),),
    ),
]


def fixed(count):
    """Return settings for a number of examples, the same ones in each run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def drawn(count, thinned=8):
    """Return different programs, of which hypothesis has drawn some times as many.

    Its first examples, and those that follow each other, are alike.
    """
    found = {}

    @settings(fixed(count * thinned), phases=[Phase.generate])
    @given(step_sequences.programs())
    def collect(program):
        found[program] = None

    collect()
    return list(found)[-1 :: -max(1, len(found) // count)][:count]


pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """Spare each session the search for schedulers among the objects that exist by now."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def close_to(values, program):
    if program.dtype.itemsize == 8:
        return pytest.approx(values, rel=1e-12, abs=1e-13)
    return pytest.approx(values, rel=1e-5, abs=2e-6)


def check(program, found, world):
    """Compare the outcomes of the runs of a program with that of plain torch, and of each other."""
    whole, resumed = found
    right = expected(program, world)
    assert whole.step == right.step == program.steps()
    assert whole.rates == pytest.approx(right.rates, rel=1e-12)
    assert whole.weights == close_to(right.weights, program)
    assert whole.states == close_to(right.states, program)
    if program.overflow is None:
        assert whole.norms == close_to(right.norms, program)
    ends = [
        (one.step, one.weights, one.states, one.rates[-len(program.optimizers) :])
        for one in (whole, resumed)
    ]
    assert ends[0] == ends[1], "after a resume"


def check_alone(program):
    with tempfile.TemporaryDirectory() as folder:
        check(program, trained(program, Path(folder)), 1)


@pytest.mark.parametrize("program", LISTED, ids=range(len(LISTED)))
def test_listed_program_trains_as_plain_torch(program):
    check_alone(program)


def test_any_program_trains_as_plain_torch():
    for program in drawn(25):
        try:
            check_alone(program)
        except Exception as error:
            error.add_note(repr(program))
            raise


@pytest.mark.slow
@fixed(500)
@given(step_sequences.programs())
def test_each_of_many_programs_trains_as_plain_torch(program):
    check_alone(program)


def train_each(programs, folder, backend):
    """Return the outcomes of each program, or the text of the error that ended this rank."""
    found = []
    for number, program in enumerate(programs):
        try:
            found.append(trained(program, Path(folder, str(number)), backend))
        except Exception:
            return [*found, traceback.format_exc()]
    return found


def check_on_two_ranks(programs, folder, backend):
    results = ranks.values(
        ranks.run(2, train_each, programs, str(folder), backend, timeout=60 + 5 * len(programs))
    )
    for program, *found in zip(programs, *results, strict=False):
        try:
            for one in found:
                assert not isinstance(one, str), one
                check(program, one, 2)
        except AssertionError as error:
            error.add_note(f"on two ranks with {backend}: {program!r}")
            raise
    assert {len(one) for one in results} == {len(programs)}


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_listed_programs_train_on_two_ranks_as_plain_torch(backend, tmp_path):
    check_on_two_ranks(LISTED, tmp_path, backend)


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        ("ddp", 20),
        ("fsdp", 4),
        pytest.param("ddp", 500, marks=pytest.mark.slow),
        pytest.param("fsdp", 150, marks=pytest.mark.slow),
    ],
)
def test_any_program_trains_on_two_ranks_as_plain_torch(backend, count, tmp_path):
    programs = drawn(count, 2 if count > 100 else 8)
    if backend == "fsdp":  # which refuses a loss scale
        programs = [program for program in programs if program.overflow is None]
    check_on_two_ranks(programs, tmp_path, backend)
