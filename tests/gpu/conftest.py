"""What the tests on a GPU share; the first GPU that pytest's process sees is enough for them."""

import functools
import sys
from functools import partial
from pathlib import Path

import on_gpu
import pytest
import ranks
import torch

from hpctrain.errors import StartError
from hpctrain.gpus import CUDA

# The batteries of the other folders are passed on a GPU too.
_TESTS = Path(__file__).resolve().parent.parent
sys.path += [str(_TESTS / "multiproc"), str(_TESTS / "unit")]


@pytest.fixture
def run(lacking):
    """`on_gpu.run`."""
    if not torch.cuda.is_available():
        lacking("gpu", "torch sees none; nvidia-smi and hpctrain doctor may say why")
    return on_gpu.run


@pytest.fixture
def shared(run, lacking):
    """`on_gpu.run`, whose ranks share one GPU over NCCL."""
    if refusal := _nccl_refuses():
        lacking("nccl-shared-gpu", f"NCCL does not let ranks share one: {refusal}")
    return _share()


def _share():
    env = {CUDA: on_gpu.visible()[0], "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return partial(on_gpu.run, env=env)


@functools.cache
def _nccl_refuses() -> str:
    """What an NCCL says that does not know the variable; empty where it takes the ranks."""
    from test_backends import identity

    results = _share()(2, identity)
    for result in results:
        # The code of NCCL for what torch calls "Duplicate GPU detected".
        if isinstance(result, StartError) and "invalid usage" in str(result):
            return result.found
    ranks.values(results)
    return ""
