"""Ranks that share a GPU: runs resume bit for bit, and flipped bits are found."""

import importlib.util

import faults
import pytest
import ranks
import test_replica_check
from test_resume_after_kill import SIZE, SLOW, stopped_step

from hpctrain.errors import exit_codes


@pytest.fixture(params=["ddp", "fsdp", "horovod"])
def over(request, nccl, lacking, monkeypatch):
    """Return the options that choose the backend, for ranks that share one GPU."""
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build --cuda")

    def run(*arguments, env=None, **settings):
        return nccl(*arguments, env={**nccl.keywords["env"], **(env or {})}, **settings)

    monkeypatch.setattr(ranks, "run", run)
    return ("--backend", request.param)


def test_run_on_a_gpu_resumes_after_kill_9_of_one_rank(over, references):
    killed = faults.start(SIZE, *over, hurt=("kill@13:rank1",))
    assert killed.code in (None, exit_codes.FAILED)
    assert all(isinstance(result, Exception) for result in killed.results)
    faults.resume(SIZE, *over)
    begin = faults.begins("run")[-1]
    assert begin in (8, 10)
    faults.same("run", references(SIZE, *over), twice=13 - begin)


def test_run_on_a_gpu_resumes_after_a_stop(over, references):
    step = stopped_step(faults.start(SIZE, *SLOW, *over, hurt=("term@11",)))
    assert 11 <= step < 24
    faults.resume(SIZE, *over)
    faults.same("run", references(SIZE, *over), twice=0)


@pytest.mark.parametrize("over", ["ddp", "horovod"], indirect=True)
@pytest.mark.parametrize(
    ("what", "name", "options"),
    [
        (test_replica_check.weight, "4.bias", {}),
        (test_replica_check.moment, "exp_avg of Adam for 4.bias", {"optimizer": "Adam"}),
        (test_replica_check.gradient, "4.bias", {}),
    ],
)
def test_flipped_bit_on_a_gpu_is_found_and_its_rank_named(
    over, evidence, lacking, what, name, options
):
    test_replica_check.test_flipped_bit_is_found_at_the_next_check_and_its_rank_named(
        evidence, lacking, what, name, {**options, "backend": over[1]}
    )
