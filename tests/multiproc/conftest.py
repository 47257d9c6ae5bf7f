"""The battery: checks that every backend has to pass."""

import importlib.util
from functools import partial

import pytest
import ranks

BACKENDS = ("auto", "horovod")  # auto: single for one rank, ddp for more


@pytest.fixture(params=BACKENDS)
def run(request, lacking):
    """`ranks.run`, which names the backend for `test_backends.session` there."""
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    return partial(ranks.run, env={"TEST_BACKEND": request.param})
